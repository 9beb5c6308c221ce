"""Wrong input gets an error of one sentence, with the given and the expected value."""

import pytest
import torch

from tritoncaps import (
    Capsules,
    ClassCaps,
    ConvCaps2d,
    ConvVectorCaps2d,
    DynamicRouting,
    EMRouting,
    LinearMargin,
    PrimaryCaps,
    RoutingMap,
    SigmoidMargin,
    VBRouting,
    VectorCaps,
    VectorPrimaryCaps,
    functional,
    use_backend,
)
from tritoncaps.data import ImageSet, familiar_views
from tritoncaps.models import CapsNet, Decoder, MatrixCapsNet


def capsules(types=3, space=(5, 5), **kwargs):
    return Capsules(torch.randn(2, types, *space, 4, 4, **kwargs), torch.rand(2, types, *space, **kwargs))


LAYER = ConvCaps2d(3, 4, 3)
DECODER = Decoder(5, 4, 1, 6)
VECTORS = Capsules(torch.randn(2, 5, 4), torch.rand(2, 5))


# a call, and a regular expression for its error message
CASES = [
    (
        lambda: LAYER(capsules(types=2)),
        "poses must have 3 capsule types, the in_caps of this ConvCaps2d, but they have 2",
    ),
    (
        lambda: LAYER(capsules(space=(5,))),
        r"poses must have shape \[N, 3, H, W, 4, 4\], but it has \[2, 3, 5, 4, 4\]",
    ),
    (
        lambda: LAYER(capsules().poses),
        "capsules must be Capsules.poses, activations., but ConvCaps2d got a Tensor",
    ),
    (
        lambda: LAYER(capsules(dtype=torch.float64)),
        "poses must have the dtype of the layer, torch.float32",
    ),
    (
        lambda: LAYER(capsules(device="meta")),
        "poses must be on the device of the layer, cpu, but they are on meta",
    ),
    (lambda: LAYER(capsules(space=(2, 5))), "kernel is larger than the input along axis 0"),
    (
        lambda: LAYER(Capsules(capsules().poses, torch.rand(2, 3, 5, 4))),
        r"activations must have shape \[2, 3, 5, 5\]",
    ),
    (
        lambda: LAYER(Capsules(capsules().poses.long(), capsules().activations)),
        "poses must have a floating-point dtype",
    ),
    (
        lambda: LAYER(Capsules(torch.randn(2, 3, 5, 5, 4, 3), torch.rand(2, 3, 5, 5))),
        "poses must have shape",
    ),
    (lambda: LAYER(Capsules([1.0], torch.rand(2, 3, 5, 5))), "poses must be a tensor, but it is a list"),
    (lambda: ClassCaps(3, 4)(capsules(types=2)), "the in_caps of this ClassCaps"),
    (lambda: ClassCaps(3, 4)(None), "ClassCaps got a NoneType"),
    (lambda: ClassCaps(3, 0), "num_classes must be a whole number of at least 1, but it is 0"),
    (lambda: ConvCaps2d(3, 2.5, 3), "out_caps must be a whole number of at least 1, but it is 2.5"),
    (
        lambda: ConvCaps2d(3, 4, (3, 3, 3)),
        "kernel_size must be one number or 2, one for each axis",
    ),
    (lambda: ConvCaps2d(3, 4, 3, padding=-1), "padding must be at least 0"),
    (
        lambda: ConvCaps2d(3, 4, 3, backend="cuda"),
        "backend must be one of 'reference', 'cpu', 'triton' or None",
    ),
    (lambda: ConvCaps2d(3, 4, 3, routing=DynamicRouting()), "routing must be a routing of matrix capsules"),
    (lambda: PrimaryCaps(3, 4)(torch.randn(2, 5, 8, 8)), r"features must have shape \[N, 3, H, W\]"),
    (lambda: PrimaryCaps(3, 4)(capsules()), "features must be a tensor, but it is a Capsules"),
    (lambda: EMRouting(iterations=0), "iterations must be a whole number of at least 1, but it is 0"),
    (
        lambda: EMRouting(competition="none"),
        "competition must be one of 'global', 'local', 'positions', but it is 'none'",
    ),
    (lambda: EMRouting(variance_floor=0.0), "variance_floor must be a number above 0"),
    (lambda: EMRouting(final_lambda=-1.0), "final_lambda must be a number above 0"),
    (lambda: EMRouting(gradient="some"), "gradient must be one of 'all', 'last'"),
    (
        lambda: MatrixCapsNet(2, 5)(torch.randn(1, 2, 10, 32)),
        "images must be at least 17x17, but they are 10x32",
    ),
    (lambda: MatrixCapsNet(2, 5)(torch.randn(1, 3, 32, 32)), r"images must have shape \[N, 2, H, W\]"),
    (lambda: MatrixCapsNet(2, 5, channels=(1, 2)), "channels must be four numbers"),
    (lambda: functional.squash(torch.ones(3), dim=2), "dim must name an axis"),
    (lambda: LinearMargin(steps=0), "steps must be a whole number of at least 1, but it is 0"),
    (lambda: SigmoidMargin(steps=0), "steps must be a whole number of at least 1, but it is 0"),
    (lambda: DECODER(VECTORS, torch.tensor([0, 5])), "labels must be at least 0 and below 5, but one is 5"),
    (
        lambda: familiar_views(ImageSet(torch.zeros(1, 1, 8, 8).byte(), torch.zeros(1).long(), ("toy",)), "azimuth"),
        "data must have the factor 'azimuth', but its factors are none",
    ),
    (
        lambda: functional.mixture_assignments(
            *capsules(), torch.randn(1, 2, 5, 4, 4), {"beta_a": torch.zeros(5)}, RoutingMap.full((5, 5)), VBRouting()
        ),
        r"weight must have shape \[1, 3, C, 4, 4\], but it has \[1, 2, 5, 4, 4\]",
    ),
    (
        lambda: functional.pose_votes(torch.ones(2, 3, 4, 4), torch.ones(1, 3, 4, 4, 4), "map"),
        "routing_map must be a RoutingMap",
    ),
    (
        lambda: functional.pose_votes(torch.ones(2, 3, 4, 4), torch.ones(1, 2, 4, 4, 4), RoutingMap.full(())),
        r"weight must have shape \[1, 3, C, 4, 4\], but it has \[1, 2, 4, 4, 4\]",
    ),
    (
        lambda: functional.dynamic_routing(torch.ones(2, 3, 8), torch.ones(1, 3, 4, 7, 5), RoutingMap.full(())),
        r"weight must have shape \[1, 3, C, 8, E\]",
    ),
    (
        lambda: functional.dynamic_routing(
            torch.ones(2, 3, 8), torch.ones(1, 3, 4, 8, 5), RoutingMap.full(()), priors=torch.ones(3, 4)
        ),
        r"priors must have shape \[1, 3, 4\], but it has \[3, 4\]",
    ),
    (
        lambda: functional.dynamic_routing(
            torch.ones(2, 3, 8), torch.ones(1, 3, 4, 8, 5).double(), RoutingMap.full(())
        ),
        "weight must have the dtype of poses, torch.float32, but it has torch.float64",
    ),
    (
        lambda: functional.dynamic_routing(
            torch.ones(2, 3, 8), torch.ones(1, 3, 4, 8, 5), RoutingMap.full(()), EMRouting()
        ),
        "routing must be an instance of DynamicRouting",
    ),
    (
        lambda: functional.dynamic_routing(
            torch.ones(2, 3, 8), torch.ones(1, 3, 4, 8, 129), RoutingMap.full(()), backend="triton"
        ),
        r"weight \[K, B, C, D, E\] must have E of at most 128 on triton, but its shape is \[1, 3, 4, 8, 129\]",
    ),
    (lambda: functional.squash([1.0]), "vectors must be a tensor, but it is a list"),
    (lambda: DynamicRouting(iterations=True), "iterations must be a whole number of at least 1, but it is True"),
    (lambda: DynamicRouting(gradient="none"), "gradient must be one of 'all', 'last'"),
    (
        lambda: VectorCaps(12, 4, 5, 6)(torch.randn(2, 3, 3, 4)),
        r"poses must hold 12 capsules of 4 numbers for each image.*but they have shape \[2, 3, 3, 4\]",
    ),
    (lambda: VectorCaps(12, 4, 5, 6)(torch.randn(12, 4)), "poses must hold 12 capsules of 4 numbers"),
    (lambda: VectorCaps(12, 4, 5, 6)("capsules"), "capsules must be Capsules or a tensor of poses, but VectorCaps"),
    (lambda: VectorCaps(12, 4, 5, 6)(torch.randn(2, 12, 4).double()), "poses must have the dtype of the layer"),
    (lambda: VectorCaps(12, 0, 5, 6), "in_dim must be a whole number of at least 1, but it is 0"),
    (lambda: VectorCaps(12, 4, 5, 6, routing=EMRouting()), "routing must be a routing of vector capsules"),
    (lambda: VectorCaps(12, 4, 5, 6, backend="gpu"), "backend must be one of 'reference', 'cpu', 'triton' or None"),
    (
        lambda: ConvVectorCaps2d(3, 4, 5, 6, 3)(torch.randn(2, 3, 5, 5, 7)),
        r"poses must have shape \[N, 3, H, W, 4\], but it has \[2, 3, 5, 5, 7\]",
    ),
    (lambda: ConvVectorCaps2d(3, 4, 5, 6, 3)(torch.randn(2, 3, 2, 5, 4)), "kernel is larger than the input"),
    (lambda: ConvVectorCaps2d(3, 4, 5, 6, 3, stride=0), "stride must be at least 1"),
    (lambda: VectorPrimaryCaps(3, 4, 8)(torch.randn(2, 5, 8, 8)), r"features must have shape \[N, 3, H, W\]"),
    (lambda: VectorPrimaryCaps(3, 4, 2.5), "dim must be a whole number of at least 1, but it is 2.5"),
    (lambda: CapsNet(image_size=16), "image_size must be a whole number of at least 17, but it is 16"),
    (
        lambda: CapsNet(channels=2, primary_caps=1)(torch.randn(1, 1, 32, 32)),
        r"images must have shape \[N, 1, 28, 28\], but it has \[1, 1, 32, 32\]",
    ),
    (lambda: DECODER(VECTORS, [1, 2]), "labels must be a tensor, but it is a list"),
    (lambda: DECODER(VECTORS, torch.ones(2)), "labels must be whole numbers, but their dtype is torch.float32"),
    (lambda: DECODER(VECTORS, torch.ones(3).long()), r"labels must have shape \[2\] or \[2, m\], but they have"),
    (lambda: DECODER(VECTORS, count=6), "count must be at most 5, the classes, but it is 6"),
]


@pytest.mark.parametrize(("call", "sentence"), CASES, ids=[sentence.replace("\\", "") for _, sentence in CASES])
def test_sentence(call, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="backend must be one of"), use_backend("fast"):
        pass


def test_triton_says_what_it_needs(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(RuntimeError, match="backend 'triton' needs a GPU, or TRITON_INTERPRET=1"):
        ConvCaps2d(3, 4, 3, backend="triton")(capsules())


def test_triton_takes_cpu_tensors_for_an_emulator(monkeypatch):
    """The interpreter's kernels replace those of an emulator; only the environment variable allows CPU tensors."""
    layer, given = ClassCaps(1, 2), Capsules(torch.randn(1, 1, 2, 4, 4), torch.rand(1, 1, 2))
    with use_backend("triton"):
        expected = layer(given)
        monkeypatch.delenv("TRITON_INTERPRET")
        monkeypatch.setenv("TRITONCAPS_TRITON_ON_CPU", "1")
        assert torch.equal(layer(given).poses, expected.poses)


def test_a_model_without_decoder_says_so():
    with pytest.raises(RuntimeError, match="this CapsNet has no decoder"):
        CapsNet(channels=2, primary_caps=1, decoder=False).reconstruct(VECTORS)
