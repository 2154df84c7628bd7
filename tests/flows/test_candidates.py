"""Workloads of several devices get as many at once, or are refused before anything starts."""

from __future__ import annotations

import pytest

from flows.candidates import candidates
from qualification.errors import RefusedError
from qualification.execution.probes.gpus import GpuReader
from qualification.records import Ground
from qualification.rules import load_rules
from qualification.workloads import devices_needed
from tests.scripted_nvml import GPUS, ScriptedNvml


def test_a_release_beside_another_device_is_refused_on_a_host_with_one_gpu(nvml: ScriptedNvml) -> None:
    count = devices_needed(required.name for required in load_rules("adoption").rules.workloads)
    nvml.idle()
    with GpuReader() as reader, pytest.raises(RefusedError, match="2 GPUs are needed at once and there are 1"):
        candidates(Ground.NATIVE, reader, count)
    nvml.idle(GPUS[:2])
    with GpuReader() as reader:
        assert candidates(Ground.NATIVE, reader, count) == GPUS[:2]
        assert len(candidates(Ground.REHEARSAL, reader, count)) >= count
