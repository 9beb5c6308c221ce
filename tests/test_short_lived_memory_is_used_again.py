"""Memory of results that one operator returns for the next one."""

import threading

import pytest
import torch

from tritoncaps.kernels.common.cpu.workspace import LARGEST, short_lived


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_memory_is_used_again_after_the_last_view(dtype):
    first = short_lived(1000, dtype)
    assert first.shape == (1000,)
    assert first.dtype == dtype
    place, view = first.data_ptr(), first.detach()[:10].view(2, 5)
    del first
    other = short_lived(1000, dtype)
    assert other.data_ptr() != place
    view.fill_(1.0)
    other.fill_(2.0)
    assert (view == 1).all()
    del view
    assert short_lived(1000, dtype).data_ptr() == place


def test_a_smaller_result_fits_into_free_memory_and_a_larger_one_does_not():
    large = short_lived(3000, torch.float32)
    place = large.data_ptr()
    del large
    small = short_lived(2000, torch.float32)
    assert small.data_ptr() == place
    assert small.numel() == 2000
    del small
    larger = short_lived(4000, torch.float32)
    larger.fill_(1.0)
    assert larger.sum() == 4000


def test_threads_do_not_share_it():
    places = []

    def call():
        places.append(short_lived(1000, torch.float32).data_ptr())

    mine = short_lived(1000, torch.float32)
    place = mine.data_ptr()
    del mine
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert places != [place]
    assert short_lived(1000, torch.float32).data_ptr() == place


@pytest.mark.parametrize("count", [0, LARGEST // 4 + 1])
def test_nothing_and_very_large_results_get_new_memory(count):
    assert short_lived(count, torch.float32).shape == (count,)
