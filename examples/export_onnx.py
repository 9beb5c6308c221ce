"""Export a network to ONNX with a dynamic batch size, and run it with onnxruntime. Needs onnxscript and onnxruntime.

python examples/export_onnx.py [FILE]
"""

import sys
import tempfile
from pathlib import Path

import onnxruntime
import torch
from torch import nn

from tritoncaps import ClassCaps, EMRouting, PrimaryCaps


def network():
    """A network with one routed layer, which exports in seconds. Larger networks take longer, because the export uses
    the reference, which has many operations."""
    torch.manual_seed(0)
    features = (nn.Conv2d(1, 8, 5, stride=4), nn.ReLU())
    return nn.Sequential(*features, PrimaryCaps(8, 4), ClassCaps(4, 10, routing=EMRouting(iterations=2))).eval()


def main(file=None):
    model = network()
    images = torch.randn(2, 1, 28, 28)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(file or Path(folder) / "capsules.onnx")
        batch = {0: torch.export.Dim("batch", min=1, max=1024)}
        torch.onnx.export(
            model, (images,), path, dynamo=True, dynamic_shapes=(batch,), input_names=["images"], verbose=False
        )
        session = onnxruntime.InferenceSession(path)
        images = torch.randn(5, 1, 28, 28)
        poses, activations = session.run(None, {"images": images.numpy()})
    with torch.no_grad():
        expected = model(images).activations
    difference = (torch.from_numpy(activations) - expected).abs().max().item()
    print(f"poses {poses.shape}, activations {activations.shape}, largest difference from torch: {difference:.1e}")
    return difference


if __name__ == "__main__":
    main(*sys.argv[1:])
