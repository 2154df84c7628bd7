"""The `qualify` command."""


def main() -> None:
    """Start the command line."""
