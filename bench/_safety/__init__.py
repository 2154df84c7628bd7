"""The experiment on admission's safety, the same on a virtual card and on a real one: run, refuse, compare."""
