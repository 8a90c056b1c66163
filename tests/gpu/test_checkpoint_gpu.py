"""What is written of tensors on a GPU is what they were when it was asked for."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from depthroute.parallel import stored

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_tensors_that_change_while_they_are_written_are_written_as_they_were(tmp_path):
    copies = stored.Copies()
    tensors = {f"{n}": torch.randn(1000, 257, device="cuda") for n in range(8)}
    tensors |= {"half": torch.randn(33, device="cuda").bfloat16(), "step": torch.tensor(1.0)}
    for number in range(3):  # the later ones into the memory of the first
        folder = tmp_path / str(number)
        folder.mkdir()
        expected = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
        future = stored.start_writing(tensors, folder, lambda checksums: None, None, copies)
        for tensor in tensors.values():
            tensor.add_(1)
        future.result()
        assert copies._memory.is_pinned()
        loaded = load_file(folder / "rank_00000.safetensors")
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
