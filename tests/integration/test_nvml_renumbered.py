from __future__ import annotations

import time

from tests.fakes.nvml import FakeNvml
from tests.integration.nvml_machine import four, reading
from tests.integration.test_nvml_failures import all_full


def test_a_gpu_removed_right_after_a_survey_keeps_its_row(fake_nvml: FakeNvml) -> None:
    """A list of GPUs that is out of date does not let a neighbour take its place."""

    four(fake_nvml)
    with reading() as gpus:
        before, _ = gpus.until(all_full)
        while gpus.reader._survey is None:
            gpus.tick()
            time.sleep(0.003)
        gpus.reader._survey.wait(60)
        fake_nvml.remove(1)
        uuids = [gpu.device.uuid for gpu in before]
        moved = [uuids[0], uuids[2], uuids[3], uuids[1]]

        gpus.until(lambda readings, _: moved == [gpu.device.uuid for gpu in readings])

    assert 0 == fake_nvml.open_gpm_samples
