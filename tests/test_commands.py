"""The command line: results, JSON, exit codes, and errors on one line."""

import json
import re
from functools import partial

import numpy as np
import official_files as official
import pytest
import torch
from PIL import Image

from tritoncaps import functional
from tritoncaps.cli import gpu_report, main

COMMANDS = ("train", "evaluate", "predict", "explore", "data", "info", "bench", "doctor")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A data folder, and a run with these data."""
    place = tmp_path_factory.mktemp("place")
    official.write_smallnorb(place / "data", count=40)
    arguments = ["--data", "smallnorb", "--data-dir", str(place / "data"), "--model", "linear", "--batch-size", "8"]
    assert main(["train", *arguments, "--epochs", "1", "--out", str(place / "run"), "--json"]) == 0
    return place


def test_help_has_examples(capsys):
    for command in COMMANDS:
        with pytest.raises(SystemExit) as stopped:
            main([command, "--help"])
        assert stopped.value.code == 0
        assert f"examples:\n  tritoncaps {command}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "exit codes" in capsys.readouterr().out


def test_wrong_usage_is_code_2_and_one_line(capsys):
    for arguments in ([], ["fly"], ["train", "--no-such-flag"], ["train", "--epochs", "many"], ["predict"]):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2
        prog = " ".join(["tritoncaps", *arguments[:1]]).removesuffix(" fly")
        out, error = capsys.readouterr()
        assert error.startswith(prog + ": ")
        assert error.endswith(f"(see `{prog} --help`)\n")
        assert (out, error.count("\n")) == ("", 1)


def test_help_has_one_default_for_each_setting(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("usage: tritoncaps train [--config FILE]")
    assert "] [" not in text.partition("settings, as options")[2]
    assert "loss; auto: chosen by the network [auto]" in text
    assert "[False]" not in text
    assert "[True]" not in text


def test_train_prints_json(trained, capsys, tmp_path):
    run = str(tmp_path / "run")
    arguments = ["--data", "smallnorb", "--data-dir", str(trained / "data"), "--model", "linear", "--batch-size", "8"]
    assert main(["train", *arguments, "--steps", "3", "--out", run, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["reason"], result["step"], result["folder"]) == ("finished", 3, run)
    assert main(["train", "--resume", run, "--steps", "5"]) == 0
    out = capsys.readouterr().out
    assert "finished: test accuracy" in out
    assert "epoch 1.00, step 5: test accuracy" in out


def test_a_configuration_file_and_flags(trained, capsys, tmp_path):
    arguments = [
        "train",
        "--config",
        str(trained / "run" / "config.toml"),
        "--steps",
        "2",
        "--out",
        str(tmp_path / "r"),
    ]
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 2
    assert 'model = "linear"' in (tmp_path / "r" / "config.toml").read_text()


def test_evaluate(trained, capsys):
    assert main(["evaluate", str(trained / "run"), "--by", "elevation", "--crops", "5", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    confusion = np.array(result["confusion"])
    assert (result["images"], confusion.sum()) == (40, 40)
    assert result["accuracy"] == pytest.approx(np.trace(confusion) / 40)
    assert set(result["elevation"]) == {str(n) for n in range(9)}
    assert main(["evaluate", str(trained / "run"), "--by", "azimuth"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("azimuth 340°: ") for line in lines)
    columns = lines[lines.index("true class in rows, predicted class in columns:") + 1]
    assert columns.split() == ["animal", "human", "airplane", "truck", "car"]
    for name, counts, line in zip(columns.split(), confusion, lines[-5:], strict=True):
        assert len(line) == len(columns)  # numbers are aligned to the right with the names above them
        assert line.split()[0] == name
        assert len(line.split()) == len(counts) + 1


def test_evaluate_tests_on_all_images_unless_told(trained, capsys, tmp_path):
    """Independent of the limit of the run."""
    arguments = ["--data", "smallnorb", "--data-dir", str(trained / "data"), "--model", "linear", "--batch-size", "8"]
    run = str(tmp_path / "run")
    assert main(["train", *arguments, "--steps", "2", "--test-limit", "7", "--out", run, "--json"]) == 0
    capsys.readouterr()
    for limit, sentence, count in (
        ([], "smallnorb, all 40 test images: accuracy ", 40),
        (["--test-limit", "9"], "smallnorb, 9 of the 40 test images: accuracy ", 9),
        (["--test-limit", "40"], "smallnorb, all 40 test images: accuracy ", 40),
        (["--test-limit", "99"], "smallnorb, all 40 test images: accuracy ", 40),
    ):
        assert main(["evaluate", run, *limit]) == 0
        assert capsys.readouterr().out.startswith(sentence)
        assert main(["evaluate", run, *limit, "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert (result["images"], result["all_images"]) == (count, count == 40)


def test_images_that_a_network_cannot_take_get_a_sentence(trained, capsys, tmp_path):
    official.write_mnist(tmp_path / "data")
    data = ["--data-dir", str(tmp_path / "data")]
    assert main(["evaluate", str(trained / "run"), "--data", "mnist", *data]) == 1
    expected = (
        "tritoncaps evaluate: the network is for images of 2x32x32 in 5 classes, "
        "but --data mnist gives it images of 1x28x28 in 10 classes\n"
    )
    assert capsys.readouterr().err == expected
    linear = ["--data", "mnist", "--model", "linear", "--batch-size", "2", "--steps", "1", *data]
    assert main(["train", *linear, "--out", str(tmp_path / "run"), "--json"]) == 0
    assert main(["evaluate", str(tmp_path / "run"), "--data", "multimnist", *data]) == 1  # another size
    assert "1x28x28 in 10 classes, but --data multimnist gives it images of 1x36x36" in capsys.readouterr().err
    assert main(["evaluate", str(trained / "run"), "--data", "imagenet"]) == 1
    assert "--data must be one of toynorb, " in capsys.readouterr().err


def test_a_run_with_held_out_images_ends_with_both_accuracies(trained, capsys, tmp_path):
    arguments = ["--data", "smallnorb", "--data-dir", str(trained / "data"), "--model", "linear", "--batch-size", "8"]
    arguments += ["--steps", "4", "--evaluate-every", "2", "--validation", "10"]
    assert main(["train", *arguments, "--out", str(tmp_path / "a")]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert main(["train", *arguments, "--out", str(tmp_path / "b"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["evaluated_on"] == "validation"
    assert line.startswith(
        f"finished: validation accuracy {result['accuracy']:.2%} (best {result['best_accuracy']:.2%}), "
        f"test accuracy {result['test_accuracy']:.2%} of the network with the best validation accuracy, "
    )
    assert main(["evaluate", str(tmp_path / "b"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == result["test_accuracy"]


def test_predict(trained, capsys, tmp_path):
    for name, width in (("mono.png", 48), ("pair.png", 96)):
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, width)).astype(np.uint8)).save(tmp_path / name)
    pictures = [str(tmp_path / name) for name in ("mono.png", "pair.png")]
    assert main(["predict", "--run", str(trained / "run"), *pictures, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["image"] for row in rows] == pictures
    assert all(row["class"] == max(row["scores"], key=row["scores"].get) for row in rows)
    assert main(["predict", "--run", str(trained / "run"), "--invert", pictures[0]]) == 0
    assert capsys.readouterr().out.startswith(pictures[0] + ": ")


def test_predict_goes_on_after_a_broken_file(trained, capsys, tmp_path):
    Image.new("L", (48, 48), 9).save(tmp_path / "good.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "good.png").read_bytes()[:60])
    (tmp_path / "text.png").write_text("not a picture")
    pictures = [str(tmp_path / name) for name in ("cut.png", "none.png", "text.png", "good.png")]
    assert main(["predict", "--run", str(trained / "run"), *pictures]) == 1
    out, error = capsys.readouterr()
    assert out.startswith(pictures[3] + ": ")
    assert out.count("\n") == 1
    for line, picture in zip(error.splitlines(), pictures, strict=False):
        assert line.startswith("tritoncaps predict: ")
        assert picture in line
    assert error.count("\n") == 3
    assert main(["predict", "--run", str(trained / "run"), *pictures, "--json"]) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["image"] for row in rows] == pictures
    assert ["error" in row for row in rows] == [True, True, True, False]


@pytest.mark.parametrize(("ink", "paper"), [(0, "white"), (255, "black")])
@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_ink_on_transparent_paper_stays_visible(capsys, tmp_path, mode, ink, paper):
    from tritoncaps.cli.predict import read_picture

    picture = Image.new("RGBA", (28, 28), (ink, ink, ink, 0))  # transparent, but with the colour of the ink
    picture.paste((ink, ink, ink, 255), (7, 7, 21, 21))
    picture = picture.convert("LA" if mode == "LA" else "RGBA")
    if mode == "P":
        picture = picture.quantize(2)
    picture.save(tmp_path / "ink.png")
    pixels = read_picture(tmp_path / "ink.png", 1, 28, 28)
    assert pixels[0, 14, 14] == ink
    assert pixels[0, 2, 2] == 255 - ink
    assert capsys.readouterr().err == f"{tmp_path / 'ink.png'}: transparent parts become {paper}\n"


def test_info_knows_the_papers_numbers(capsys):
    assert main(["info", "--model", "matrix-capsnet", "--data", "smallnorb", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    layers = {layer["name"]: layer for layer in summary["layers"]}
    # 6x6 parent positions of 3x3 children, 32 to 32 types: 21 MB of votes
    assert layers["conv_caps1"]["votes"] == 36 * 9 * 32 * 32
    assert layers["conv_caps1"]["vote_bytes"] == layers["conv_caps1"]["votes"] * 64
    assert layers["class_caps"]["votes"] == 16 * 32 * 5
    assert summary["kept_bytes"] < summary["vote_bytes"] / 10
    assert summary["kept_bytes"] < summary["peak_bytes"] < summary["vote_bytes"]
    assert main(["info", "--batch-size", "2"]) == 0
    printed = capsys.readouterr()
    assert "votes" in printed.out
    assert "peak memory of a training step with 2 images: " in printed.out
    assert "profiler" not in printed.err
    assert main(["info", "--batch-size", "0"]) == 1
    assert "--batch-size must be at least 1, but it is 0" in capsys.readouterr().err


def test_info_of_vector_capsules(capsys):
    assert main(["info", "--model", "capsnet", "--data", "mnist", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["parameters"] == 8_215_568
    assert sum(layer["parameters"] for layer in summary["layers"]) == summary["parameters"]
    assert summary["layers"][-1]["name"] == "decoder"
    assert summary["votes"] == 1152 * 10
    assert summary["vote_bytes"] == 1152 * 10 * 16 * 4


def test_learning_curves(trained, capsys, tmp_path):
    curve = tmp_path / "curve.png"
    assert main(["info", "--run", str(trained / "run"), "--curve", str(curve)]) == 0
    assert Image.open(curve).size == (700, 360)
    assert main(["info", "--curve", str(curve)]) == 1
    assert "--curve needs the folder of a run" in capsys.readouterr().err


def test_data(trained, capsys, tmp_path):
    assert main(["data", "list", "--data-dir", str(trained / "data"), "--json"]) == 0
    here = {row["name"]: row["here"] for row in json.loads(capsys.readouterr().out)}
    assert here["smallnorb"]
    assert here["toynorb"]
    assert not here["mnist"]
    assert main(["data", "list"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "get it with" in line]
    assert len({line.index("get it with") for line in rows}) == 1
    sheet = tmp_path / "sheet.png"
    assert main(["data", "show", "smallnorb", "--data-dir", str(trained / "data"), "--out", str(sheet)]) == 0
    assert Image.open(sheet).size[0] > 500


def test_doctor(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["devices"][0] | {"name": ""} == {"device": "cpu", "name": "", "backend": "cpu"}
    assert report["self-test"][0]["passed"]


@pytest.mark.parametrize("broken", [False, True])
def test_gpu_report(broken, tmp_path, monkeypatch, capsys):
    """With the CPU kernels; a part that fails is one line of the report, and the others still run."""
    if broken:
        monkeypatch.setattr(functional, "e_step", lambda *_, **__: 1 / 0)
        monkeypatch.setattr(gpu_report, "_first_call", lambda *_: 1 / 0)
        monkeypatch.setattr(gpu_report, "VectorCaps", lambda *_, **__: torch.nn.Linear(7, 7))
    monkeypatch.setattr(gpu_report, "ROUNDS", 1)
    monkeypatch.setattr(gpu_report, "write_report", partial(gpu_report.write_report, examples=1, images=2, types=2))
    report = tmp_path / "report.txt"
    assert main(["doctor", "--gpu-report", str(report), "--device", "cpu"]) == int(broken)
    text = report.read_text()
    assert "passed  EM routing equals_the_reference" in text
    assert re.search(r"MatrixCapsNet.small, 2 images +\d+\.\d+ +\d+\.\d+\n", text)
    assert ("FAILED  stored votes e_step" in text) == broken
    assert text.count("ZeroDivisionError: division by zero") == 2 * broken
    assert ("mat1 and mat2 shapes" in text) == broken
    assert ("every check passed" in capsys.readouterr().out) != broken


def test_gpu_report_needs_its_device(capsys, tmp_path):
    assert main(["doctor", "--gpu-report", str(tmp_path / "x"), "--device", "cuda:7"]) == 1
    assert "--device cuda:7 does not exist: torch finds no GPU" in capsys.readouterr().err


def test_tensors_keep_their_strides_on_the_way_to_a_gpu():
    x = torch.randn(3, 4, 5).transpose(0, 2)
    assert gpu_report._moved(x, x.device).stride() == x.stride()
    assert gpu_report._moved(x[:1].expand(3, 4, 3), x.device).stride(0) == 0


def test_bench_lists_benchmarks(capsys):
    assert main(["bench"]) == 0
    assert "em_routing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["evaluate", "nowhere"], "tritoncaps evaluate: there is no checkpoint nowhere"),
        (["train", "--data", "svhn", "--data-dir", "nowhere"], "tritoncaps train: svhn: train_32x32.mat is neither in"),
        (["train", "--resume", "nowhere"], "tritoncaps train: there is no checkpoint nowhere/last.pt"),
        (["data", "get"], "tritoncaps data: `data get` needs the name of a data set"),
        (
            ["data", "show", "mnist", "--out", "no/a.png"],
            "tritoncaps data: --out no/a.png cannot be written: there is no",
        ),
        (["bench", "nothing"], "tritoncaps bench: ValueError: bench must be one of"),
        (["info", "--size", "3"], "tritoncaps info: ValueError: images must be at least 17x17"),
    ],
)
def test_errors_are_one_line_and_code_1(capsys, arguments, sentence):
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith(sentence)
    assert error.count("\n") == 1


def test_changing_what_a_run_is_gets_a_sentence(trained, capsys):
    assert main(["train", "--resume", str(trained / "run"), "--model", "capsnet"]) == 1
    assert "--model was linear in" in capsys.readouterr().err


def test_divergence_is_code_3(trained, capsys, tmp_path):
    arguments = ["train", "--data", "smallnorb", "--data-dir", str(trained / "data"), "--model", "linear"]
    arguments += ["--batch-size", "8", "--steps", "50", "--lr", "1e30", "--out", str(tmp_path / "run")]
    assert main(arguments) == 3
    error = capsys.readouterr().err
    assert "is not finite at step" in error
    assert error.count("\n") == 1


def test_debug_shows_the_traceback(capsys):
    from tritoncaps.training import CheckpointError

    with pytest.raises(CheckpointError):
        main(["evaluate", "nowhere", "--debug"])
