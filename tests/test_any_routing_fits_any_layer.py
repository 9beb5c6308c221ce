"""A user's routing class works in every layer as the built-in routings do; a violation of the protocol gets an error
of one sentence; files that version 0.1 saved still load."""

import copy
import pickle
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from tritoncaps import (
    Capsules,
    ClassCaps,
    Components,
    ConvCaps1d,
    ConvCaps2d,
    ConvCaps3d,
    ConvVectorCaps2d,
    DynamicRouting,
    EMRouting,
    GraphCaps,
    MatrixRouting,
    MixtureRouting,
    Routing,
    RoutingMap,
    SelfAttentionRouting,
    VBRouting,
    VectorCaps,
    VectorRouting,
    functional,
)
from tritoncaps.models import CapsNet, MatrixCapsNet
from tritoncaps.routing import LayerSizes, NewParameter
from tritoncaps.training import networks
from tritoncaps.training.config import Config, read_config

GRAPH = RoutingMap.from_edges([0, 1, 2, 2], [0, 0, 0, 1], 3, 2, relations=[0, 1, 0, 1])


@dataclass(frozen=True)
class MeanRouting(MatrixRouting):
    """Plain torch: a parent is the mean of all children of a type, for any map, multiplied by a matrix."""

    gain: float = 1.0

    def new_parameters(self, layer):
        return {
            "weight": NewParameter((*layer.weights, layer.in_caps, layer.out_caps, 4, 4), nn.init.ones_),
            "bias": NewParameter((layer.out_caps, 4, 4), lambda x: nn.init.constant_(x, 0.5)),
            "kind": NewParameter((len(layer.kind),)),
        }

    def route(self, capsules, weight, parameters, routing_map, backend=None):
        poses = capsules.poses.flatten(2, -3).mean(2)  # [N, B, 4, 4]
        poses = torch.einsum("nbij,bcjk->ncik", poses, weight.mean(0)) * self.gain + parameters["bias"]
        shape = (*poses.shape[:2], *routing_map.out_size)
        poses = poses.reshape(*poses.shape[:2], *[1] * len(routing_map.out_size), 4, 4).expand(*shape, 4, 4)
        return Capsules(poses, torch.sigmoid(poses.sum((-1, -2)) + parameters["kind"].sum()))


@dataclass(frozen=True)
class StepsRouting(MatrixRouting):
    """EM routing of two iterations, from the functions on stored votes."""

    parameter_names = ("beta_u", "beta_a")

    def route(self, capsules, weight, parameters, routing_map, backend=None):
        votes = functional.pose_votes(capsules.poses, weight, routing_map, backend)
        votes = functional.coordinate_addition(votes, routing_map, backend)
        shares = functional.initial_assignments(capsules.activations, weight.shape[2], routing_map)
        given = (capsules.activations, parameters["beta_u"], parameters["beta_a"], routing_map)
        first, second = EMRouting(2).lambdas
        gaussians = functional.m_step(votes, shares, *given, inverse_temperature=first, backend=backend)
        shares = functional.e_step(votes, gaussians, routing_map, backend=backend)
        gaussians = functional.m_step(votes, shares, *given, inverse_temperature=second, backend=backend)
        return Capsules(gaussians.mean, gaussians.logits.sigmoid())


@dataclass(frozen=True)
class RoundRouting(MixtureRouting):
    """A mixture: every parent has one variance for all entries."""

    parameter_names = ("beta_a",)
    least: float = 0.01

    def fit(self, moments, parameters, iteration):
        variance = moments.variance.mean((-1, -2), keepdim=True).clamp(min=self.least).expand_as(moments.mean)
        beta_a = parameters["beta_a"].reshape(-1, *[1] * (moments.support.ndim - 2))
        logit = beta_a + moments.support / moments.data_per_parent - variance.log().mean((-1, -2))
        log_weight = nn.functional.logsigmoid(logit) - 0.5 * variance.log().sum((-1, -2))
        return Components(moments.mean, 1 / variance, log_weight, logit)


@dataclass(frozen=True)
class AverageRouting(VectorRouting):
    """Vector capsules: the squashed mean of the votes."""

    def route(self, capsules, weight, parameters, routing_map, backend=None):
        votes = functional.vector_votes(capsules.poses, weight, routing_map)  # [N, P, S, B, C, E]
        poses = votes.mean((2, 3)).transpose(1, 2)
        poses = poses.reshape(*poses.shape[:2], *routing_map.out_size, poses.shape[-1])
        return functional.with_lengths(functional.squash(poses, backend=backend))


@dataclass(frozen=True)
class SilencedRouting(DynamicRouting):
    """Dynamic routing whose parents are all zero."""

    def route(self, *given):
        return super().route(*given).map(torch.zeros_like)


MATRIX = {
    "torch only": MeanRouting(2.0),
    "functions": StepsRouting(),
    "mixture": RoundRouting(2, competition="local"),
    "variational Bayes": VBRouting(2),
}
VECTOR = {"own": AverageRouting(), "dynamic": DynamicRouting(2, priors=True), "attention": SelfAttentionRouting()}
MATRIX_LAYERS = {
    "ConvCaps1d": (lambda **kwargs: ConvCaps1d(3, 4, 3, **kwargs), (5,)),
    "ConvCaps2d": (lambda **kwargs: ConvCaps2d(3, 4, (2, 3), stride=2, padding=1, **kwargs), (4, 3)),
    "ConvCaps3d": (lambda **kwargs: ConvCaps3d(3, 4, 2, **kwargs), (2, 3, 2)),
    "ClassCaps": (lambda **kwargs: ClassCaps(3, 4, **kwargs), (2, 3)),
    "GraphCaps": (lambda **kwargs: GraphCaps(3, 4, 2, **kwargs), (3,)),
}
VECTOR_LAYERS = {
    "VectorCaps": (lambda **kwargs: VectorCaps(6, 3, 4, 5, **kwargs), (6,)),
    "ConvVectorCaps2d": (lambda **kwargs: ConvVectorCaps2d(2, 3, 4, 5, 2, padding="same", **kwargs), (2, 3, 3)),
}
CASES = [
    *((layer, routing) for layer in MATRIX_LAYERS for routing in MATRIX),
    *((layer, routing) for layer in VECTOR_LAYERS for routing in VECTOR),
]
every_case = pytest.mark.parametrize(("layer", "routing"), CASES, ids=[" ".join(case) for case in CASES])


def build(layer, routing, backend="reference", **kwargs):
    """A layer and its input."""
    if layer in MATRIX_LAYERS:
        make, size = MATRIX_LAYERS[layer]
        module = make(routing=MATRIX.get(routing, routing), backend=backend, **kwargs)
        children = Capsules(torch.randn(2, 3, *size, 4, 4, **kwargs), torch.rand(2, 3, *size, **kwargs))
    else:
        make, size = VECTOR_LAYERS[layer]
        module = make(routing=VECTOR.get(routing, routing), backend=backend, **kwargs)
        children = functional.with_lengths(torch.randn(2, *size, 3, **kwargs))
    return module, (children, GRAPH) if layer == "GraphCaps" else (children,)


def backward(module, given):
    """Run a layer forward and backward: the parents, and the gradients of all parameters."""
    parents = module(*given)
    loss = (parents.poses**2).sum() + parents.activations.sum()
    gradients = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)
    return [*parents, *gradients]


@every_case
def test_forward_and_backward(layer, routing):
    module, given = build(layer, routing)
    poses, activations, *gradients = backward(module, given)
    assert poses.shape[: -2 if layer in MATRIX_LAYERS else -1] == activations.shape
    assert all(x.isfinite().all() for x in (poses, activations))
    for (name, _), gradient in zip(module.named_parameters(), gradients, strict=True):
        assert gradient is not None, f"{name} has no gradient"
        assert gradient.isfinite().all()
    assert module.weight.grad is None
    assert gradients[0].any()


@every_case
def test_copies_and_files_keep_the_layer(layer, routing, tmp_path):
    module, given = build(layer, routing)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.rand_like(parameter) / 10)
    expected = module(*given)
    other, _ = build(layer, routing)
    assert not torch.equal(other(*given).poses, expected.poses)
    torch.save(module.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for same in (other, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert same.routing == module.routing
        assert all(map(torch.equal, same(*given), expected))
        assert same.weight is not module.weight


@every_case
def test_repr_names_the_routing_and_meta_needs_no_memory(layer, routing):
    module, given = build(layer, routing, device="meta")
    assert type(module.routing).__name__ + "(" in repr(module)
    parents = module(*given)
    assert parents.poses.is_meta
    concrete, given = build(layer, routing)
    assert [x.shape for x in concrete(*given)] == [x.shape for x in parents]


@pytest.mark.parametrize(
    "case", [("ConvCaps2d", routing) for routing in MATRIX] + [("VectorCaps", "own")], ids=" ".join
)
def test_torch_compile_takes_it_as_one_graph(case):
    module, given = build(*case, backend="cpu")
    expected = backward(module, given)
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for mine, theirs in zip(backward(compiled, given), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_inductor_takes_it():
    module, given = build("ClassCaps", "torch only")
    expected = backward(module, given)
    torch.compiler.reset()
    for mine, theirs in zip(backward(torch.compile(module, fullgraph=True), given), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_parameters_have_the_shapes_and_starts_that_the_routing_says():
    module, _ = build("ConvCaps2d", "torch only")
    assert {name: list(x.shape) for name, x in module.named_parameters()} == {
        "weight": [2, 3, 3, 4, 4, 4],
        "bias": [4, 4, 4],
        "kind": [4],
    }
    assert (module.weight == 1).all()
    assert (module.bias == 0.5).all()
    assert not module.kind.any()
    nn.init.normal_(module.bias)
    module.reset_parameters()
    assert (module.bias == 0.5).all()
    assert build("ClassCaps", "torch only")[0].kind.shape == (len("class"),)
    assert build("GraphCaps", "torch only")[0].kind.shape == (len("graph"),)


def test_the_functions_on_stored_votes_make_em_routing():
    module, given = build("ClassCaps", "functions")
    fused, _ = build("ClassCaps", EMRouting(2))
    fused.load_state_dict(module.state_dict())
    torch.testing.assert_close(tuple(module(*given)), tuple(fused(*given)))


@pytest.mark.parametrize("layer", VECTOR_LAYERS)
def test_a_subclass_of_dynamic_routing_routes_itself(layer):
    module, given = build(layer, SilencedRouting(2))
    assert not module(*given).poses.any()
    with pytest.raises(TypeError, match="assignments needs the route of DynamicRouting, but the routing is Silenced"):
        module.assignments(*given)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_subclass_of_em_routing_fits_itself(backend):
    @dataclass(frozen=True)
    class CertainRouting(EMRouting):
        def fit(self, moments, parameters, iteration):
            return super().fit(moments, parameters, iteration)._replace(logit=torch.full_like(moments.support, 9.0))

    module, given = build("ClassCaps", CertainRouting(2), backend)
    torch.testing.assert_close(module(*given).activations, torch.full((2, 4), 9.0).sigmoid())


def test_a_mixture_may_have_parameters_of_any_shape():
    @dataclass(frozen=True)
    class PulledRouting(RoundRouting):
        """A routing whose means are a learned pose of each type."""

        parameter_names = ("beta_a", "pull")

        def new_parameters(self, layer):
            return super().new_parameters(layer) | {"pull": NewParameter((layer.out_caps, 4, 4), nn.init.ones_)}

        def fit(self, moments, parameters, iteration):
            components = super().fit(moments, parameters, iteration)
            return components._replace(mean=0 * components.mean + parameters["pull"])

    module, given = build("ClassCaps", PulledRouting(2))
    assert (module(*given).poses == 1).all()


# Violations of the protocol, and the error messages.


def matrix(**methods):
    """A routing of matrix capsules with these methods."""
    return type("MyRouting", (MatrixRouting,), {"route": lambda *_: None, **methods})()


def mixture(fit):
    return type("MyRouting", (MixtureRouting,), {"fit": fit})()


def returns(change):
    """A `route` with correct parents, except for ``change``."""

    def route(self, capsules, weight, parameters, routing_map, backend=None):
        shape = (len(capsules.poses), weight.shape[2], *routing_map.out_size)
        return change(Capsules(capsules.poses.new_zeros(*shape, 4, 4), capsules.poses.new_zeros(shape)))

    return matrix(route=route)


def fits(**changes):
    """A `fit` with correct components, except for ``changes``."""

    def fit(self, moments, parameters, iteration):
        number = torch.zeros_like(moments.support)
        right = Components(moments.mean, torch.ones_like(moments.mean), number, number)
        return right._replace(**{name: change(getattr(right, name)) for name, change in changes.items()})

    return mixture(fit)


def names(**found):
    return matrix(new_parameters=lambda self, layer: found)


class KindlessRouting(Routing):
    def new_parameters(self, layer):
        return {}

    def route(self, *given):
        return None


WEIGHT = NewParameter((3, 4, 4, 4))
BROKEN = {
    "no routing": ("EMRouting", "routing must be a routing of matrix capsules, .* but ClassCaps got 'EMRouting'"),
    "a class": (EMRouting, "routing must be a routing of matrix capsules, such as EMRouting, but ClassCaps got <class"),
    "wrong kind": (DynamicRouting(), "matrix capsules, .*, but DynamicRouting is one of vector capsules"),
    "no kind": (KindlessRouting(), "KindlessRouting.capsules must be 'matrix' or 'vector', but it is None"),
    "no weight": (names(bias=NewParameter((4,))), "must return a parameter named 'weight', but it returned bias"),
    "no dict": (matrix(new_parameters=lambda *_: ["weight"]), "must return a dict of NewParameter, .* a list"),
    "a bare shape": (names(weight=(3, 4, 4, 4)), "must return 'weight' as a NewParameter, but it is a tuple"),
    "a clash with torch": (names(weight=WEIGHT, forward=NewParameter((1,))), "must not name a parameter 'forward'"),
    "a clash with an option": (
        names(weight=WEIGHT, coordinates=NewParameter((1,))),
        "MyRouting must not name a parameter 'coordinates': layers use that name",
    ),
    "no name": (names(**{"weight": WEIGHT, "a.b": NewParameter((1,))}), "must return .* Python identifiers, .* 'a.b'"),
    "route returns nothing": (returns(lambda x: None), r"MyRouting.route must return Capsules\(.*returned a NoneType"),
    "route returns a tensor": (
        returns(lambda x: x.poses),
        r"MyRouting.route must return Capsules\(.*returned a Tensor",
    ),
    "route returns a list of poses": (
        returns(lambda x: x._replace(poses=[1.0])),
        "poses returned by MyRouting.route must be a tensor, but it is a list",
    ),
    "route returns vectors": (
        returns(lambda x: x._replace(poses=x.poses[..., 0])),
        r"poses returned by MyRouting.route must have shape \[2, 4, 4, 4\], but it has \[2, 4, 4\]",
    ),
    "route returns other activations": (
        returns(lambda x: x._replace(activations=x.activations[:1])),
        r"activations returned by MyRouting.route must have shape \[2, 4\], but it has \[1, 4\]",
    ),
    "fit returns a tensor": (
        mixture(lambda self, moments, *_: moments.mean),
        r"MyRouting.fit must return Components\(mean, precision, log_weight, logit\), but it returned a Tensor",
    ),
    "fit returns a number": (fits(logit=lambda x: 0.5), "MyRouting.fit must return logit as a tensor, .* a float"),
    "fit returns another shape": (
        fits(precision=lambda x: x[..., :1]),
        r"MyRouting.fit must return precision of shape \[2, 4, 4, 4\], but it has shape \[2, 4, 4, 1\]",
    ),
    "fit returns another dtype": (
        fits(log_weight=lambda x: x.double()),
        "MyRouting.fit must return log_weight of dtype torch.float32, but it has torch.float64",
    ),
}


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("how", BROKEN)
def test_a_sentence_says_how_the_protocol_is_broken(how, backend):
    routing, sentence = BROKEN[how]

    def call():
        layer, given = build("ClassCaps", routing, backend)
        layer(*given)

    with pytest.raises((TypeError, ValueError), match=sentence) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_weight_must_fit_the_kernel():
    with pytest.raises(
        ValueError, match=r"must return a weight of shape \[2, 3, ...\], but its shape is \[3, 4, 4, 4\]"
    ):
        build("ConvCaps2d", names(weight=WEIGHT))


def test_a_parameter_named_as_an_option_of_a_convolution_is_refused():
    stride = NewParameter((1,))
    with pytest.raises(ValueError, match="must not name a parameter 'stride'"):
        build("ConvCaps2d", names(weight=NewParameter((2, 3, 3, 4, 4, 4)), stride=stride))


def test_a_missing_parameter_is_named():
    poses, activations, weight = torch.randn(2, 3, 4, 4), torch.rand(2, 3), torch.randn(1, 3, 4, 4, 4)
    with pytest.raises(ValueError, match="parameters must hold 'beta_a' for RoundRouting, but they hold none"):
        functional.mixture_routing(poses, activations, weight, {}, RoutingMap.full(()), RoundRouting())
    layer, given = build("ClassCaps", VBRouting())
    layer.routing = EMRouting()
    with pytest.raises(ValueError, match="parameters must hold 'beta_u' for EMRouting, but they hold beta_a"):
        layer(*given)


@pytest.mark.parametrize("routing", [MeanRouting(), type("Own", (RoundRouting,), {"route": lambda *_: None})()])
def test_logits_and_assignments_need_a_mixture(routing):
    with pytest.raises(TypeError, match="logits=True needs"):
        ClassCaps(3, 4, routing=routing, logits=True)
    layer, given = build("ClassCaps", routing)
    with pytest.raises(TypeError, match="assignments needs"):
        layer.assignments(*given)


def test_vector_layers_refuse_matrix_routings():
    with pytest.raises(TypeError, match=r"routing of vector capsules.*but MeanRouting is one of matrix capsules"):
        build("VectorCaps", MeanRouting())


# Files that version 0.1 saved.


def saved_by_0_1(kind, **state):
    """The pickle of a frozen dataclass: its class by name, and its fields."""
    routing = object.__new__(kind)
    vars(routing).update(state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "__module__", "tritoncaps.routing")  # the module in version 0.1
        return pickle.dumps(routing)


def test_pickled_routings_of_0_1_load():
    fields = {"iterations": 2, "final_lambda": 0.5, "lambda_decay": 0.9, "variance_floor": 1e-3, "mean_data": False}
    fields |= {"competition": "local", "gradient": "last"}
    saved = saved_by_0_1(EMRouting, **fields)
    assert b"tritoncaps.routing\x94\x8c\tEMRouting" in saved
    loaded = pickle.loads(saved)
    assert loaded == EMRouting(**fields)
    assert hash(loaded) == hash(EMRouting(**fields))
    fields = {"iterations": 2, "competition": "local", "none_of_the_above": True, "gradient": "last"}
    loaded = pickle.loads(saved_by_0_1(DynamicRouting, **fields))
    assert loaded == DynamicRouting(**fields)


def test_state_dicts_have_the_names_and_shapes_of_0_1():
    def shapes(module):
        return {name: list(x.shape) for name, x in module.state_dict().items()}

    matrix_net = shapes(MatrixCapsNet(2, 5, (4, 3, 2, 6), device="meta"))
    assert matrix_net == {
        "conv.weight": [4, 2, 5, 5],
        "conv.bias": [4],
        "primary.pose.weight": [48, 4, 1, 1],
        "primary.pose.bias": [48],
        "primary.activation.weight": [3, 4, 1, 1],
        "primary.activation.bias": [3],
        "conv_caps1.weight": [3, 3, 3, 2, 4, 4],
        "conv_caps1.beta_u": [2],
        "conv_caps1.beta_a": [2],
        "conv_caps2.weight": [3, 3, 2, 6, 4, 4],
        "conv_caps2.beta_u": [6],
        "conv_caps2.beta_a": [6],
        "class_caps.weight": [6, 5, 4, 4],
        "class_caps.beta_u": [5],
        "class_caps.beta_a": [5],
    }
    capsnet = shapes(CapsNet(channels=4, primary_caps=2, priors=True, decoder=False, device="meta"))
    assert capsnet == {
        "conv.weight": [4, 1, 9, 9],
        "conv.bias": [4],
        "primary.pose.weight": [16, 4, 9, 9],
        "primary.pose.bias": [16],
        "class_caps.weight": [72, 10, 8, 16],
        "class_caps.priors": [72, 10],
    }
    assert shapes(ConvVectorCaps2d(2, 3, 4, 5, 3, priors=True)) == {
        "weight": [3, 3, 2, 4, 3, 5],
        "priors": [3, 3, 2, 4],
    }


FILES = sorted((Path(__file__).parent.parent / "docs" / "results").glob("*/config.toml"))


@pytest.mark.parametrize("path", FILES, ids=[path.parent.name for path in FILES])
def test_configurations_load(path):
    config = Config(**read_config(path))
    assert networks.build(config.model, networks.Task(config.data, 1, 32, 32, 5), config.iterations) is not None


def test_there_are_configurations():
    assert len(FILES) >= 4


def test_the_sizes_that_a_routing_sees():
    seen = []

    class SeeingRouting(MeanRouting):
        def new_parameters(self, layer):
            seen.append(layer)
            return super().new_parameters(layer)

    for layer in ("ConvCaps2d", "ClassCaps", "GraphCaps"):
        build(layer, SeeingRouting())
    assert set(seen) == {
        LayerSizes("conv", (2, 3), 3, 4, (4, 4), (4, 4)),
        LayerSizes("class", (), 3, 4, (4, 4), (4, 4)),
        LayerSizes("graph", (2,), 3, 4, (4, 4), (4, 4)),
    }
