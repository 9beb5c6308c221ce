"""Changed poses and assigned pixels, compared with results that are computed by hand."""

import pytest
import torch

from tritoncaps import drawings


def test_one_dimension_is_moved_at_a_time():
    poses = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    moved = drawings.perturb_poses(poses, [-0.25, 0.0, 0.5])
    assert moved.shape == (2, 3, 3, 3)
    torch.testing.assert_close(moved[:, :, 1], poses[:, None].expand(2, 3, 3))
    torch.testing.assert_close(moved[0, 2, 0], torch.tensor([1.0, 2.0, 2.75]))
    torch.testing.assert_close(moved[1, 0, 2], torch.tensor([4.5, 5.0, 6.0]))
    assert (moved - poses[:, None, None]).count_nonzero(-1).amax() == 1


def rectangles():
    """Two on 6x8, which overlap in rows 2 to 3 and columns 3 to 4."""
    pictures = torch.zeros(1, 2, 1, 6, 8)
    pictures[0, 0, 0, 0:4, 0:5] = 0.9  # 20 pixels
    pictures[0, 1, 0, 2:6, 3:8] = 0.7  # 20 pixels
    return pictures


def test_pixels_of_two_rectangles():
    assigned = drawings.assign_pixels(rectangles())
    expected = torch.full((1, 6, 8), -1)
    expected[0, 2:6, 3:8] = 1
    expected[0, 0:4, 0:5] = 0  # the overlap belongs to the brighter one
    assert torch.equal(assigned, expected)
    assert (drawings.assign_pixels(rectangles(), threshold=0.8) == 1).sum() == 0
    assert (drawings.assign_pixels(rectangles(), threshold=0.8) == 0).sum() == 20


def test_intersection_over_union_of_rectangles():
    """Drawn one column too far to the left: 4x4 of both, 4x6 of either. The second is exact."""
    objects, drawn = rectangles(), rectangles()
    drawn[0, 0, 0] = 0.0
    drawn[0, 0, 0, 0:4, 1:6] = 0.6
    found = drawings.intersection_over_union(drawn, objects)
    torch.testing.assert_close(found, torch.tensor([[16 / 24, 1.0]]))


def test_nothing_drawn_of_nothing_is_right():
    blank = torch.zeros(1, 2, 1, 6, 8)
    assert drawings.intersection_over_union(blank, blank).tolist() == [[1.0, 1.0]]
    assert drawings.intersection_over_union(blank, rectangles()).tolist() == [[0.0, 0.0]]


def test_bad_input():
    with pytest.raises(ValueError, match=r"drawings must have shape \[N, m, C, H, W\]"):
        drawings.assign_pixels(torch.zeros(2, 1, 6, 8))
    with pytest.raises(ValueError, match="objects must have shape"):
        drawings.intersection_over_union(rectangles(), rectangles()[:, :1])
    with pytest.raises(ValueError, match=r"offsets must have shape \[K\]"):
        drawings.perturb_poses(torch.zeros(3), [[0.1], [0.2]])
