"""bench/peers.py times a layer that it imports from a folder, and ours. Here, the folder has a small substitute."""

import re
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "bench" / "peers.py"

# Files with the names and signatures that the adapters use; each layer is a product, so that there are gradients.
FILES = {
    "capsulelayers.py": """
import torch

class DenseCapsule(torch.nn.Module):
    def __init__(self, children, dim, parents, out_dim, routings):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(parents, children, out_dim, dim))

    def forward(self, x):
        return torch.einsum("pcod,ncd->npo", self.weight.cuda(), x)
""",
    "model/capsules.py": """
import torch
from torch import nn
from torchvision import transforms  # for data, not for layers

class ConvCaps(nn.Module):
    def __init__(self, B, C, K, P, stride, iters):
        super().__init__()
        self.scale = torch.cuda.FloatTensor(1).fill_(2.0)
        self.layer = nn.Conv2d(B * 17, C * 17, K, stride)

    def forward(self, x):
        return self.layer(x.permute(0, 3, 1, 2)) * self.scale
""",
}


@pytest.fixture
def folder(tmp_path):
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    return tmp_path


@pytest.fixture
def peers(monkeypatch):
    """The script's names, and a function that calls it as a command in this process."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    names = runpy.run_path(str(SCRIPT))

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
        names["main"]()

    return names, run


def test_theirs_and_ours_are_timed_and_their_memory_is_measured(peers, folder, capsys):
    _, run = peers
    run("--repo", folder, "--adapter", "xifengguo", "--rounds", 1, "--images", 2, "--children", 6)
    printed = capsys.readouterr().out
    assert "DenseCapsule, 6 capsules of 8 to 10 of 16, 2 images" in printed
    rows = re.findall(r"^(theirs|ours|ratio) +(\S+) +(\S+)$", printed, re.MULTILINE)
    assert [name for name, *_ in rows] == ["theirs", "ours", "ratio"]
    assert all(float(number) >= 0 for row in rows for number in row[1:])


def test_code_that_asks_for_a_gpu_and_for_missing_packages_runs(peers, folder):
    names, _ = peers
    found = names["times"](names["ADAPTERS"]["yl-1993"], folder, names["Sizes"](2, 2, 3), rounds=1)
    assert found["theirs"] > 0
    assert found["ours"] > 0


def test_every_adapter_makes_our_step(peers):
    names, _ = peers
    for adapter in names["ADAPTERS"].values():
        adapter.ours(names["Sizes"](2, 2, 2, children=3))()


def test_a_folder_without_the_layer_gets_a_sentence(peers, tmp_path):
    _, run = peers
    with pytest.raises(SystemExit, match=r"must be a clone with the file capsule_network\.py, but there is none"):
        run("--repo", tmp_path, "--adapter", "gram-ai")
