"""Tensors: what they say about themselves, views, copies, NumPy."""

import gc
import weakref

import numpy as np
import pytest

import gyre

DTYPES = {"f32": np.float32, "f16": np.float16, "u8": np.uint8, "i32": np.int32, "u32": np.uint32,
          "i64": np.int64}


def counted(*shape, dtype=np.int32):
    return np.arange(np.prod(shape), dtype=dtype).reshape(shape)


@pytest.mark.parametrize("name", [*DTYPES, "bf16"])
def test_new_tensors_are_zero_and_say_what_they_are(name):
    tensor = gyre.empty((2, 3), name)
    assert (tensor.shape, tensor.strides, tensor.dtype, tensor.ndim, tensor.size) == ((2, 3), (3, 1), name, 2, 6)
    assert tensor.nbytes == 6 * {"i64": 8, "f32": 4, "i32": 4, "u32": 4, "f16": 2, "bf16": 2, "u8": 1}[name]
    assert tensor.is_contiguous and not tensor.is_read_only and len(tensor) == 2
    assert tensor.device == gyre.Device("cpu") and tensor.device.name == "cpu"
    assert name in repr(tensor) and "[2, 3]" in repr(tensor)
    if name != "bf16":
        assert not tensor.numpy().any()


@pytest.mark.parametrize("name", DTYPES)
def test_numpy_shares_memory_both_ways(name):
    array = counted(2, 3, 4, dtype=DTYPES[name])
    tensor = gyre.from_numpy(array)
    assert (tensor.dtype, tensor.shape, tensor.data_ptr) == (name, array.shape, array.ctypes.data)
    back = tensor.numpy()
    assert back.ctypes.data == array.ctypes.data and back.dtype == array.dtype and (back == array).all()
    back[1, 2, 3] = 99
    assert array[1, 2, 3] == 99
    assert np.asarray(tensor).ctypes.data == array.ctypes.data
    assert np.array(tensor, dtype=np.float64)[1, 2, 3] == 99


def test_bfloat16_of_ml_dtypes_shares_memory():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = counted(2, 3).astype(ml_dtypes.bfloat16)
    tensor = gyre.from_numpy(array)
    assert (tensor.dtype, tensor.data_ptr) == ("bf16", array.ctypes.data)
    back = tensor.numpy()
    assert back.dtype == ml_dtypes.bfloat16 and back.ctypes.data == array.ctypes.data
    assert (back.astype(np.float32) == counted(2, 3)).all()


def test_bfloat16_without_ml_dtypes_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    with pytest.raises(gyre.Error, match="bf16.*ml_dtypes"):
        gyre.zeros((2,), "bf16").numpy()


def test_strided_arrays_keep_their_strides():
    array = counted(6, 8)[1::2, ::3]
    tensor = gyre.from_numpy(array)
    assert tensor.strides == (16, 3) and not tensor.is_contiguous
    assert (tensor.numpy() == array).all() and tensor.numpy().strides == array.strides
    assert (gyre.from_numpy(counted(3, 4).T).numpy() == counted(3, 4).T).all()
    assert gyre.from_numpy(np.broadcast_to(np.float32(7), (3, 4))).strides == (0, 0)


def test_zero_dimensional_and_zero_sized():
    scalar = gyre.from_numpy(np.array(5, np.int32))
    assert scalar.shape == () and scalar.numpy() == 5
    with pytest.raises(TypeError):
        len(scalar)
    for shape in [(0,), (3, 0), (0, 4, 2)]:
        empty = gyre.from_numpy(np.empty(shape, np.float32))
        assert empty.shape == shape and empty.size == 0 and empty.nbytes == 0
        assert empty.numpy().shape == shape and np.from_dlpack(empty).shape == shape
    assert gyre.from_numpy(np.empty((4, 0), np.float32)[::-1]).size == 0  # its stride is negative


@pytest.mark.parametrize(
    "array, words",
    [
        (np.zeros(3), "float64"),
        (np.zeros(3, np.uint64), "uint64"),
        (np.zeros(3, np.uint16), "uint16"),
        (np.zeros(3, bool), "bool"),
        (np.zeros(3, np.complex64), "complex64"),
        (np.zeros(3, ">f4"), ">f4"),
        (np.zeros(3, object), "object"),
        (np.zeros(4, np.float32)[::-1], "stride -1.*negative"),
        (np.zeros((2,) * 7, np.float32), "at most 6 dimensions, got 7"),
        (np.zeros(9, np.uint8)[1:].view(np.float32), "aligned to 4"),
        (np.zeros(4, [("a", np.float32), ("b", np.uint8)])["a"], "stride of 5 bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_arrays_that_cannot_be_shared_are_refused_by_name(array, words):
    held = weakref.ref(array.base if array.base is not None else array)
    with pytest.raises(gyre.Error, match=f"from_numpy: .*{words}") as caught:
        gyre.from_numpy(array)
    assert isinstance(caught.value, ValueError) and caught.value.code == "invalid_argument"
    assert held() is not None


def test_what_is_no_array_is_a_type_error():
    for value in ([1.0, 2.0], 3, None, "cpu", np.float32(3)):
        with pytest.raises(TypeError):
            gyre.asarray(value)
    with pytest.raises(TypeError, match="from_numpy: needs a NumPy array, got list"):
        gyre.from_numpy([1.0])


def test_read_only_arrays_stay_read_only(encoder):
    array = np.ones((1, 1, 4), np.float32)
    array.flags.writeable = False
    tensor = gyre.from_numpy(array)
    assert tensor.is_read_only and not tensor.numpy().flags.writeable
    gyre.kv_copy(encoder, tensor, gyre.empty((2, 1, 4)))  # reading is fine
    with pytest.raises(gyre.Error, match="kv_copy: k_cache.*read-only"):
        gyre.kv_copy(encoder, np.zeros((1, 1, 4), np.float32), tensor)
    with pytest.raises(gyre.Error, match="read-only"):
        tensor.write_from(np.zeros((1, 1, 4), np.float32))
    assert encoder.size == 1 and array.sum() == 4


def test_views_follow_numpy():
    array = counted(4, 5, 6)
    tensor = gyre.from_numpy(array)
    for key in [
        0,
        -1,
        (1, 2, 3),
        (1, -2),
        slice(1, 3),
        (slice(None), 2),
        (Ellipsis, 1),
        (0, Ellipsis),
        Ellipsis,
        (slice(None, None, 2), slice(1, None, 3), slice(-2, None)),
        (slice(3, 1),),
        (Ellipsis, slice(10, 20)),
        (),
        np.int64(2),
    ]:
        view, expected = tensor[key].numpy(), np.asarray(array[key])
        assert view.shape == expected.shape and (view == expected).all(), key
        shares = isinstance(array[key], np.ndarray) and expected.size != 0  # NumPy copies what is one number
        assert not shares or view.ctypes.data == expected.ctypes.data, key
    assert (tensor.slice(1, 2, 3).numpy() == array[:, 2:5]).all()
    assert (tensor.permute([2, 0, 1]).numpy() == array.transpose(2, 0, 1)).all()
    assert (tensor.reshape((20, 6)).numpy() == array.reshape(20, 6)).all()
    assert (tensor.strided([3], [7], 2).numpy() == array.reshape(-1)[[2, 9, 16]]).all()


def test_views_that_leave_the_tensor_are_refused():
    tensor = gyre.zeros((4, 5))
    for key, error in [
        (4, IndexError),
        (-5, IndexError),
        ((0, 5), IndexError),
        ((0, 0, 0), gyre.Error),
        (slice(None, None, -1), gyre.Error),
        ((Ellipsis, Ellipsis), gyre.Error),
        ("a", TypeError),
        (None, TypeError),
        (1.5, TypeError),
    ]:
        with pytest.raises(error):
            tensor[key]
    with pytest.raises(gyre.Error, match="tensor.slice"):
        tensor.slice(0, 3, 2)
    with pytest.raises(gyre.Error, match="tensor.reshape"):
        tensor.reshape((3, 5))
    with pytest.raises(gyre.Error, match="contiguous"):
        tensor.permute((1, 0)).reshape((20,))
    with pytest.raises(gyre.Error, match="tensor.strided"):
        tensor.strided((21,), (1,))


def test_iterating_stops_at_the_end():
    assert [row.numpy().tolist() for row in gyre.from_numpy(counted(2, 2))] == [[0, 1], [2, 3]]


def test_copies_are_their_own():
    array = counted(4, 6)
    tensor = gyre.from_numpy(array)[:, ::2]
    copy = tensor.copy()
    assert copy.is_contiguous and copy.data_ptr != tensor.data_ptr and (copy.numpy() == array[:, ::2]).all()
    tensor.write_from(np.full((4, 3), 7, np.int32))
    assert (array[:, ::2] == 7).all() and (array[:, 1::2] == counted(4, 6)[:, 1::2]).all()
    target = np.empty((4, 3), np.int32)
    copy.read_to(target)
    assert (target == counted(4, 6)[:, ::2]).all()


def test_copies_between_unlike_arrays_are_refused():
    tensor = gyre.zeros((2, 3))
    for other, words in [
        (np.zeros((3, 2), np.float32), r"shape \[2, 3\]"),
        (np.zeros((2, 3), np.int32), "f32.*i32"),
        (np.zeros((3, 2), np.float32).T, "contiguous"),
    ]:
        with pytest.raises(gyre.Error, match=words):
            tensor.write_from(other)
        with pytest.raises(gyre.Error):
            tensor.read_to(other)
    fixed = np.zeros((2, 3), np.float32)
    fixed.flags.writeable = False
    with pytest.raises(gyre.Error, match="read-only"):
        tensor.read_to(fixed)


def test_bad_requests_for_memory():
    with pytest.raises(gyre.Error, match='dtype must be one of f32, .* got "f64"'):
        gyre.zeros((2,), "f64")
    with pytest.raises(gyre.Error, match="at most 6"):
        gyre.zeros((1,) * 7)
    with pytest.raises(TypeError):
        gyre.zeros((-1, 2))
    with pytest.raises(MemoryError) as caught:
        gyre.zeros((1 << 60,))
    assert isinstance(caught.value, gyre.Error) and caught.value.code == "out_of_memory"


def test_the_array_lives_as_long_as_a_tensor_or_a_view_of_it():
    class Watched(np.ndarray):
        pass

    array = counted(4, 4).view(Watched)
    gone = weakref.ref(array)
    view = gyre.from_numpy(array)[1:]
    del array
    gc.collect()
    assert gone() is not None
    again = view.numpy()
    del view
    gc.collect()
    assert gone() is not None and again[0, 0] == 4
    del again
    gc.collect()
    assert gone() is None


def test_a_refused_wrap_lets_go_of_the_array():
    array = np.zeros(9, np.uint8)[1:].view(np.float32)
    gone = weakref.ref(array)
    with pytest.raises(gyre.Error, match="aligned"):
        gyre.from_numpy(array)
    del array
    gc.collect()
    assert gone() is None


def test_no_growth_with_numpy(no_growth):
    array = np.zeros((2, 3), np.float32)
    no_growth(lambda: gyre.from_numpy(array)[0].numpy())


def test_no_growth_of_own_memory(no_growth):
    no_growth(lambda: gyre.zeros((64, 16)).numpy())


def test_no_growth_of_refusals(no_growth):
    wrong = np.zeros(3)

    def refused():
        try:
            gyre.from_numpy(wrong)
        except gyre.Error:
            pass

    no_growth(refused)
