"""PyTorch tensors share memory with Gyre's; skipped where PyTorch is not installed."""

import gc
import weakref

import numpy as np
import pytest

import gyre

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "u8": torch.uint8, "i32": torch.int32}


@pytest.mark.parametrize("name", DTYPES)
def test_round_trips_share_memory(name):
    given = torch.arange(24).reshape(2, 3, 4).to(DTYPES[name])
    tensor = gyre.from_dlpack(given)
    assert (tensor.dtype, tensor.shape, tensor.strides) == (name, (2, 3, 4), (12, 4, 1))
    assert tensor.data_ptr == given.data_ptr() and gyre.asarray(given).data_ptr == given.data_ptr()
    back = torch.from_dlpack(tensor)
    assert back.data_ptr() == given.data_ptr() and back.dtype == given.dtype and torch.equal(back, given)
    back[1, 2, 3] = 7
    assert given[1, 2, 3] == 7


def test_views_keep_their_strides():
    given = torch.arange(60, dtype=torch.float32).reshape(3, 4, 5).permute(2, 0, 1)[1::2, :, 1:]
    tensor = gyre.from_dlpack(given)
    assert tensor.strides == given.stride() and tensor.data_ptr == given.data_ptr()
    assert torch.equal(torch.from_dlpack(tensor), given)
    assert torch.equal(torch.from_dlpack(tensor[1]), given[1])
    assert torch.from_dlpack(gyre.from_dlpack(torch.empty(3, 0))).shape == (3, 0)
    assert torch.from_dlpack(gyre.from_dlpack(torch.tensor(5.0))).item() == 5


def test_numpy_torch_and_gyre_are_one_memory():
    array = np.zeros((2, 2), np.float32)
    tensor = torch.from_dlpack(gyre.from_dlpack(torch.from_numpy(array)))
    tensor[0, 1] = 3
    assert array[0, 1] == 3 and tensor.data_ptr() == array.ctypes.data


def test_refusals():
    for given, words in [
        (torch.zeros(2, dtype=torch.float64), "float64"),
        (torch.zeros(2, dtype=torch.int16), "int16"),
        (torch.zeros(2, dtype=torch.bool), "bool"),
        (torch.zeros((1,) * 7), "at most 6"),
    ]:
        with pytest.raises(gyre.Error, match=words):
            gyre.from_dlpack(given)
    with pytest.raises((RuntimeError, BufferError), match="grad"):
        gyre.from_dlpack(torch.zeros(2, requires_grad=True))


@pytest.mark.parametrize("how", ["device", "unordered", "operand"])
def test_every_way_in_shares_memory_and_refuses_alike(encoder, how):
    """With the device known, torch's C functions hand the tensor over where it has them (2.10 and later)."""

    def take(given):
        if how == "operand":
            out = gyre.zeros(given.shape, "f32")
            gyre.hadamard(encoder, given, out)
            return None
        return gyre.from_dlpack(given, "cpu", ordered=how == "device")

    given = torch.arange(256, dtype=torch.float32).reshape(2, 2, 64).transpose(0, 1)[:, 1:]
    tensor = take(given)
    if tensor is not None:
        assert (tensor.data_ptr, tensor.shape) == (given.data_ptr(), given.shape)
        # Some versions of torch hand a dimension of size 1 over with a stride of 1.
        strides = zip(given.shape, tensor.strides, given.stride())
        assert all(ours == theirs for size, ours, theirs in strides if size > 1)
        del given
        gc.collect()
        assert tensor.copy().numpy()[1, 0, 63] == 255
    for refused, words in [
        (torch.zeros(2, 64, requires_grad=True), "grad"),
        (torch.nn.Parameter(torch.zeros(2, 64)), "grad"),
        (torch.zeros(2, 64).to_sparse(), "strided"),
        (torch.zeros(2, 64, dtype=torch.float64), "float64"),
    ]:
        with pytest.raises((gyre.Error, RuntimeError, BufferError), match=words):
            take(refused)


def test_tensors_taken_are_given_back(no_growth):
    given = torch.zeros(4096)
    no_growth(lambda: gyre.from_dlpack(given, "cpu"), cycles=20_000)
    kept = [gyre.from_dlpack(given, "cpu", ordered=False) for _ in range(3)]
    del given
    gc.collect()
    kept[2].write_from(np.ones(4096, np.float32))
    assert kept[0].numpy().sum() == 4096


def test_ops_take_torch_tensors(encoder):
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    out = torch.zeros(2, 64)
    gyre.hadamard(encoder, x, out)
    encoder.submit().wait()
    assert out[0, 0] == 8 and not out[:, 1:].any()


def test_either_side_may_go_first():
    given = torch.ones(1000)
    gone = weakref.ref(given.untyped_storage())
    tensor = gyre.from_dlpack(given)
    del given
    gc.collect()
    assert tensor.numpy().sum() == 1000
    back = torch.from_dlpack(tensor)
    del tensor
    gc.collect()
    assert back.sum() == 1000
    del back
    gc.collect()
    assert gone() is None
    own = torch.from_dlpack(gyre.zeros((1000,), "bf16"))
    gc.collect()
    assert own.sum() == 0


def test_no_growth(no_growth):
    given = torch.zeros(4, 4)
    no_growth(lambda: torch.from_dlpack(gyre.from_dlpack(given)))
