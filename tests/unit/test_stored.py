"""A rank's file is an ordinary safetensors file, whatever of its memory goes into it."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from depthroute.parallel import stored


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "wide": torch.randn(3, 5, generator=generator),
        "half": torch.randn(7, generator=generator).bfloat16(),
        "across": torch.randn(4, 6, generator=generator).T,
        "one": torch.tensor(3.0),
        "none": torch.empty(0, 4),
        "whole": torch.arange(5) + seed,
        "is": torch.tensor([True, False, True]),
    }


def write(folder, copies, given):
    folder.mkdir()
    checksums = {}
    stored.start_writing(given, folder, checksums.update, None, copies).result()
    return folder / "rank_00000.safetensors", checksums


def test_a_file_is_byte_for_byte_what_safetensors_writes(tmp_path):
    path, checksums = write(tmp_path / "ours", stored.Copies(), tensors())
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert json.loads(metadata["DCP_SHARDING_INFO"])["wide"] == {"saved_offsets": [0, 0]}
    theirs = tmp_path / "theirs.safetensors"
    save_file({n: t.contiguous() for n, t in tensors().items()}, theirs, metadata=metadata)
    assert path.read_bytes() == theirs.read_bytes()
    assert checksums == {path.name: stored.files.sha256(theirs)}


def test_copies_that_are_written_again_have_the_new_numbers_and_are_planned_once(
    tmp_path, monkeypatch
):
    plans, make = [], stored.DefaultSavePlanner.create_local_plan
    monkeypatch.setattr(
        stored.DefaultSavePlanner,
        "create_local_plan",
        lambda planner: plans.append(planner) or make(planner),
    )
    copies = stored.Copies()
    for seed in range(3):
        path, _ = write(tmp_path / str(seed), copies, tensors(seed))
        loaded = load_file(path)
        assert loaded.keys() == tensors().keys()
        assert all(torch.equal(loaded[name], t) for name, t in tensors(seed).items())
    assert len(plans) == 1


@pytest.mark.parametrize("change", ["fewer", "more", "another shape", "another dtype"])
def test_other_tensors_than_before_are_laid_out_anew(tmp_path, change):
    copies, given = stored.Copies(), tensors()
    write(tmp_path / "first", copies, given)
    if change == "fewer":
        del given["across"]
    elif change == "more":
        given["late"] = torch.ones(2)
    elif change == "another shape":
        given["wide"] = given["wide"].T
    else:
        given["wide"] = given["wide"].double()
    path, _ = write(tmp_path / "second", copies, given)
    loaded = load_file(path)
    assert loaded.keys() == given.keys()
    for name, tensor in given.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor)
