"""The loaders read the official formats; a damaged file gets an error of one sentence."""

import pickle
import zipfile

import numpy as np
import official_files as official
import pytest
import torch

from tritoncaps import data
from tritoncaps.data import DataError
from tritoncaps.data.idx import read_idx
from tritoncaps.data.matlab import read_mat
from tritoncaps.data.norb import reduce


@pytest.mark.parametrize("gz", [True, False])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_mnist(tmp_path, gz, name):
    images, labels = official.write_mnist(tmp_path, gz=gz, name=name)
    for split in ("train", "test"):
        loaded = data.load(name, split, tmp_path)
        assert torch.equal(loaded.images, torch.tensor(images)[:, None])
        assert loaded.labels.tolist() == labels.tolist()
        assert loaded.shape == data.DATASETS[name].shape
        assert loaded.classes == data.DATASETS[name].classes


def test_files_may_lie_in_the_data_folder_itself(tmp_path, monkeypatch):
    official.write_mnist(tmp_path)
    monkeypatch.setenv("TRITONCAPS_DATA", str(tmp_path / "mnist"))
    assert len(data.load("mnist", "train")) == 40


@pytest.mark.parametrize("gz", [True, False])
def test_smallnorb(tmp_path, gz):
    pairs, categories, info = official.write_smallnorb(tmp_path, gz=gz)
    loaded = data.load("smallnorb", "test", tmp_path)
    assert loaded.images.shape == (20, 2, 48, 48)
    means = torch.tensor(pairs).double().unflatten(3, (48, 2)).unflatten(2, (48, 2)).mean(dim=(3, 5))
    assert (loaded.images.double() - means).abs().max() <= 0.5
    assert loaded.labels.tolist() == categories.tolist()
    assert [loaded.factors[f].tolist() for f in ("instance", "elevation", "azimuth", "lighting")] == info.T.tolist()
    assert loaded.mono().images.shape == (20, 1, 48, 48)
    full = data.norb.load_smallnorb("train", tmp_path, size=96)
    assert torch.equal(full.images, torch.tensor(pairs))


def test_familiar_views_are_a_third(tmp_path):
    official.write_smallnorb(tmp_path, count=54)
    loaded = data.load("smallnorb", "train", tmp_path)
    for factor in ("azimuth", "elevation"):
        assert data.familiar_views(loaded, factor).sum() == 18
    assert set(loaded.select(data.familiar_views(loaded, "azimuth")).factors["azimuth"].tolist()) == {
        0,
        2,
        4,
        30,
        32,
        34,
    }


@pytest.mark.parametrize("archive", [True, False])
def test_cifar10(tmp_path, archive):
    pixels, labels = official.write_cifar10(tmp_path, archive)
    loaded = data.load("cifar10", "train", tmp_path)
    assert torch.equal(loaded.images.flatten(1), torch.tensor(pixels))
    assert loaded.labels.tolist() == labels
    assert len(data.load("cifar10", "test", tmp_path)) == 4


@pytest.mark.parametrize("compress", [True, False])
def test_svhn(tmp_path, compress):
    images = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 5)).astype(np.uint8)
    labels = np.array([[1], [10], [3], [2], [9]], np.uint8)
    official.write(tmp_path / "svhn" / "train_32x32.mat", official.mat({"X": images, "y": labels}, compress))
    loaded = data.load("svhn", "train", tmp_path)
    assert torch.equal(loaded.images, torch.tensor(images).permute(3, 2, 0, 1))
    assert loaded.labels.tolist() == [1, 0, 3, 2, 9]


@pytest.mark.parametrize("zipped", [True, False])
def test_affnist(tmp_path, zipped):
    official.write_mnist(tmp_path)
    images = np.random.default_rng(0).integers(0, 256, (1600, 3)).astype(np.uint8)
    struct = {"affine": np.eye(3), "image": images, "label_int": np.array([[7, 0, 2]], np.uint8)}
    content = official.mat({"affNISTdata": struct}, compress=True)
    if zipped:
        (tmp_path / "affnist").mkdir()
        with zipfile.ZipFile(tmp_path / "affnist" / "test.mat.zip", "w") as archive:
            archive.writestr("test.mat", content)
    else:
        official.write(tmp_path / "affnist" / "test.mat", content)
    test = data.load("affnist", "test", tmp_path)
    assert torch.equal(test.images.flatten(1), torch.tensor(images.T.copy()))
    assert test.labels.tolist() == [7, 0, 2]
    train = data.load("affnist", "train", tmp_path)
    assert train.images.shape == (40, 1, 40, 40)
    assert train.images[:, :, 6:34, 6:34].any()
    assert not train.images[:, :, :6].any()


def test_multimnist_is_two_digits_and_reproducible(tmp_path):
    official.write_mnist(tmp_path)
    pairs = data.load("multimnist", "train", tmp_path)
    indices = [0, 7, 399, 123]
    images, labels, digits = pairs.__getitems__(indices)
    assert images.shape == (4, 1, 36, 36)
    assert digits.shape == (4, 2, 1, 36, 36)
    assert torch.equal(images, digits.int().sum(dim=1).clamp(max=255).byte())
    assert (labels.sum(dim=1) == 2).all()  # always two classes
    again = data.load("multimnist", "train", tmp_path)
    for n, index in enumerate(indices):
        assert all(torch.equal(a, b[n]) for a, b in zip(again[index], (images, labels, digits), strict=True))
        own = pairs.digits.labels[index // pairs.pairs]
        assert labels[n, own] == 1
        place = labels[n].nonzero().flatten().tolist().index(int(own))
        assert _is_shifted(digits[n, place, 0], pairs.digits.images[index // pairs.pairs, 0])


def test_a_part_of_multimnist_has_many_digits(tmp_path):
    """Few images of few digits would all show the same classes."""
    official.write_mnist(tmp_path)
    pairs = data.load("multimnist", "test", tmp_path)
    chosen, others = pairs.split(15, seed=0)
    assert (len(chosen), len(chosen.digits)) == (15, 15)
    assert (len(others), len(others.digits)) == (250, 25)
    assert len(pairs.split(100, seed=0)[0]) == 120  # three of each of the 40 digits
    assert len(chosen.__getitems__(range(15))[1].unique(dim=0)) > 5


def _is_shifted(canvas, digit):
    return any(
        torch.equal(canvas[y : y + 28, x : x + 28], digit) and canvas.int().sum() == digit.int().sum()
        for y in range(9)
        for x in range(9)
    )


def sentence(call) -> str:
    with pytest.raises(DataError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_missing_file_is_named_with_its_remedy(tmp_path):
    message = sentence(lambda: data.load("mnist", "train", tmp_path))
    assert "train-images-idx3-ubyte" in message
    assert "tritoncaps data get mnist" in message
    assert str(tmp_path) in message


def corrupt(path, how):
    content = path.read_bytes()
    if how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "noise":
        path.write_bytes(np.random.default_rng(0).bytes(len(content)))
    else:
        path.write_bytes(content + b"more")


@pytest.mark.parametrize("how", ["truncated", "empty", "noise", "longer"])
@pytest.mark.parametrize("gz", [True, False])
def test_corrupt_mnist(tmp_path, how, gz):
    if gz and how == "longer":
        pytest.skip("gzip ignores what follows a stream of zeros, or refuses it")
    official.write_mnist(tmp_path, gz=gz)
    path = tmp_path / "mnist" / ("train-images-idx3-ubyte" + ".gz" * gz)
    corrupt(path, how)
    assert path.name in sentence(lambda: data.load("mnist", "train", tmp_path))


@pytest.mark.parametrize("how", ["truncated", "empty", "noise", "longer"])
def test_corrupt_smallnorb(tmp_path, how):
    official.write_smallnorb(tmp_path, gz=False)
    for kind in ("dat", "cat", "info"):
        path = tmp_path / "smallnorb" / f"{official.STEMS['train']}-{kind}.mat"
        before = path.read_bytes()
        corrupt(path, how)
        assert path.name in sentence(lambda: data.load("smallnorb", "train", tmp_path))
        path.write_bytes(before)


@pytest.mark.parametrize("how", ["truncated", "empty", "noise"])
def test_corrupt_cifar10_and_svhn(tmp_path, how):
    official.write_cifar10(tmp_path, archive=True)
    corrupt(tmp_path / "cifar10" / "cifar-10-python.tar.gz", how)
    assert "cifar-10-python.tar.gz" in sentence(lambda: data.load("cifar10", "train", tmp_path))
    official.write_cifar10(tmp_path / "plain", archive=False)
    corrupt(tmp_path / "plain" / "cifar10" / "cifar-10-batches-py" / "data_batch_3", how)
    assert "data_batch_3" in sentence(lambda: data.load("cifar10", "train", tmp_path / "plain"))
    images = np.zeros((32, 32, 3, 5), np.uint8)
    content = official.mat({"X": images, "y": np.ones((5, 1), np.uint8)}, compress=True)
    path = official.write(tmp_path / "svhn" / "test_32x32.mat", content)
    corrupt(path, how)
    assert path.name in sentence(lambda: data.load("svhn", "test", tmp_path))


def test_swapped_files_are_noticed(tmp_path):
    official.write_mnist(tmp_path, gz=False)
    images, labels = (tmp_path / "mnist" / f"train-{k}-ubyte" for k in ("images-idx3", "labels-idx1"))
    content = images.read_bytes()
    images.write_bytes(labels.read_bytes())
    assert "3 axes" in sentence(lambda: data.load("mnist", "train", tmp_path))
    images.write_bytes(content)
    labels.write_bytes(official.idx(np.zeros(39, np.uint8)))
    assert "do not belong together" in sentence(lambda: data.load("mnist", "train", tmp_path))
    official.write_smallnorb(tmp_path, gz=False)
    cat, info = (tmp_path / "smallnorb" / f"{official.STEMS['train']}-{k}.mat" for k in ("cat", "info"))
    cat.write_bytes(info.read_bytes())
    assert "mixed up" in sentence(lambda: data.load("smallnorb", "train", tmp_path))


class Attack:
    def __reduce__(self):
        return print, ("this must never run",)


def test_a_pickle_cannot_run_code(tmp_path, capsys):
    official.write_cifar10(tmp_path, archive=False)
    path = tmp_path / "cifar10" / "cifar-10-batches-py" / "data_batch_1"
    path.write_bytes(pickle.dumps({b"data": Attack(), b"labels": []}, protocol=2))
    assert "print" in sentence(lambda: data.load("cifar10", "train", tmp_path))
    assert capsys.readouterr().out == ""


def test_mat_files_of_other_versions_are_refused(tmp_path):
    message = sentence(lambda: read_mat(b"\x89HDF" + bytes(200), tmp_path / "new.mat"))
    assert "version 5" in message


def test_idx_of_other_types_is_refused(tmp_path):
    path = official.write(tmp_path / "floats", bytes([0, 0, 13, 1, 0, 0, 0, 0]))
    assert "idx" in sentence(lambda: read_idx(path, axes=1))


def test_wrong_names_get_a_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"data must be one of toynorb, .*, but it is 'imagenet'"):
        data.load("imagenet", "train", tmp_path)
    with pytest.raises(ValueError, match="split must be 'train' or 'test', but it is 'valid'"):
        data.load("mnist", "valid", tmp_path)
    with pytest.raises(ValueError, match="size must divide"):
        reduce(torch.zeros(1, 1, 96, 96, dtype=torch.uint8), 50)
