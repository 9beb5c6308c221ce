"""Where the files of each data set come from: addresses, sizes and checksums."""

from __future__ import annotations

from typing import NamedTuple


class Source(NamedTuple):
    """One file, and the addresses of the folders that contain it."""

    name: str
    size: int
    sha256: str
    addresses: tuple[str, ...]

    @property
    def unpacked(self) -> str:
        """The name of the unpacked file or folder, which the loaders also accept."""
        if self.name == "cifar-10-python.tar.gz":
            return "cifar-10-batches-py"
        return self.name.removesuffix(".gz").removesuffix(".zip")


def _sources(addresses: tuple[str, ...], *files: tuple[str, int, str]) -> tuple[Source, ...]:
    return tuple(Source(*file, addresses) for file in files)


_TRAIN, _TEST = "smallnorb-5x46789x9x18x6x2x96x96-training-", "smallnorb-5x01235x9x18x6x2x96x96-testing-"

SOURCES: dict[str, tuple[Source, ...]] = {
    "mnist": _sources(
        (
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        ("train-images-idx3-ubyte.gz", 9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        ("train-labels-idx1-ubyte.gz", 28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        ("t10k-images-idx3-ubyte.gz", 1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
        ("t10k-labels-idx1-ubyte.gz", 4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    ),
    "fashion-mnist": _sources(
        (
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        ),
        ("train-images-idx3-ubyte.gz", 26421880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
        ("train-labels-idx1-ubyte.gz", 29515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
        ("t10k-images-idx3-ubyte.gz", 4422102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
        ("t10k-labels-idx1-ubyte.gz", 5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
    ),
    "smallnorb": _sources(
        ("https://cs.nyu.edu/~ylclab/data/norb-v1.0-small/",),
        (f"{_TRAIN}dat.mat.gz", 131896188, "5ffd6272a07d32695ee1082a26a41a93a37aab8c28da047f8c34ed348d214873"),
        (f"{_TRAIN}cat.mat.gz", 348, "2784e542c1922060691090952b6cd6278879a216c90f81476f0f00256d42cdaa"),
        (f"{_TRAIN}info.mat.gz", 71052, "de7eb932ebe7a4ee16217fead60660d0eb3d23632c2f4d1c51f88c501c17bf32"),
        (f"{_TEST}dat.mat.gz", 130799817, "cf7104eed3e51174d2f65b66d1e5878b9da233b886f161b0d88f4510ba2c7474"),
        (f"{_TEST}cat.mat.gz", 347, "ecaf6d5bb8c3bc5eab9cf0258f6d2198dd474e016e374836fc097f2e5ff509ff"),
        (f"{_TEST}info.mat.gz", 10428, "16adf314226327ee006d1a44db8cfef52773c06c829951d5653a9f6f310248a2"),
    ),
    "affnist": _sources(
        ("https://www.cs.toronto.edu/~tijmen/affNIST/32x/transformed/",),
        ("test.mat.zip", 121743191, "2cde38ec83ee2ebfd7b901f8be5a09efb17a1bda04771f9b4905751eb945c01a"),
    ),
    "cifar10": _sources(
        ("https://www.cs.toronto.edu/~kriz/",),
        ("cifar-10-python.tar.gz", 170498071, "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"),
    ),
    "svhn": _sources(
        ("http://ufldl.stanford.edu/housenumbers/",),
        ("train_32x32.mat", 182040794, "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8"),
        ("test_32x32.mat", 64275384, "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b"),
    ),
}
