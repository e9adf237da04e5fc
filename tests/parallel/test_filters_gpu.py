"""Two GPUs that divide a vocabulary draw with filters inside a graph what one device draws from whole rows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.parallel.processes import join
from ridgeline.worker import vocabulary as module
from ridgeline.worker.vocabulary import Vocabulary
from tests.kernels.sampling.sampling_tables import Row, sampling_of
from tests.kernels.sampling.test_filter_cuts import FILTERS

VOCAB = 40_008  # each part begins with a group of noise, as the kernels want it


def rank(number: int, folder: Path) -> None:
    """Capture a draw with some scores, replay it with others, and compare its tokens with one device's."""
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    axis = join(number, 2, folder / "meeting", device, 60.0)
    module.GATHERED = 40 * VOCAB  # bytes: of the last batch in two pieces, 80 rows at once
    ops = Ops(Platform.of(device))
    vocabulary = Vocabulary(VOCAB, axis, ops)
    for rows in (1, 10, 90):
        batch = [Row(FILTERS[n % len(FILTERS)], seed=n) for n in range(rows)]
        sampling = sampling_of(batch, VOCAB, str(device))
        own_RU = torch.zeros(rows, vocabulary.each, dtype=torch.bfloat16, device=device)
        vocabulary.sample(own_RU, *sampling)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            token_R = vocabulary.sample(own_RU, *sampling)
        for seed in range(5):
            generator = torch.Generator().manual_seed(seed)
            scores_RV = (3 * torch.randn(rows, VOCAB, generator=generator)).bfloat16().to(device)
            own_RU.copy_(scores_RV[:, vocabulary.first :][:, : vocabulary.each])
            graph.replay()
            assert token_R.tolist() == ops.sample(scores_RV, *sampling).tolist(), (rows, seed)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_captured_draw_with_filters_is_that_of_one_device(tmp_path: Path) -> None:
    code = f"from pathlib import Path; from {__name__} import rank; import sys; "
    code += f"rank(int(sys.argv[1]), Path({str(tmp_path)!r}))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [subprocess.Popen([sys.executable, "-c", code, str(n)], env=environment) for n in range(2)]
    try:
        assert [process.wait(240) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
