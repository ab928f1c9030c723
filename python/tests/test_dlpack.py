"""The DLPack protocol itself, from both sides."""

import ctypes
import gc
import weakref

import numpy as np
import pytest

import gyre

name_of = ctypes.pythonapi.PyCapsule_GetName
name_of.restype = ctypes.c_char_p
name_of.argtypes = [ctypes.py_object]


class Producer:
    """Exports what `tensor` has, and notes how it was asked."""

    def __init__(self, tensor, device=None, knows_versions=True):
        self.tensor, self.device, self.knows_versions, self.asked = tensor, device, knows_versions, []

    def __dlpack_device__(self):
        return self.device or self.tensor.__dlpack_device__()

    def __dlpack__(self, **arguments):
        self.asked.append(arguments)
        if not self.knows_versions and "max_version" in arguments:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.tensor.__dlpack__(max_version=arguments.get("max_version"))


def test_round_trip_shares_memory():
    tensor = gyre.zeros((3, 4))
    for back in (gyre.from_dlpack(tensor), gyre.asarray(tensor), gyre.from_dlpack(np.from_dlpack(tensor))):
        assert (back.data_ptr, back.shape, back.strides) == (tensor.data_ptr, (3, 4), (4, 1))
    view = tensor.permute((1, 0))[1:, ::2]
    back = gyre.from_dlpack(view)
    assert (back.data_ptr, back.shape, back.strides) == (view.data_ptr, view.shape, view.strides)


@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "u8", "i32", "u32", "i64"])
def test_every_dtype_makes_the_round_trip(name):
    tensor = gyre.zeros((2, 2), name)
    assert gyre.from_dlpack(tensor).dtype == name
    assert gyre.from_dlpack(tensor.__dlpack__()).dtype == name


def test_capsules_say_their_version():
    tensor = gyre.zeros((2,))
    assert name_of(tensor.__dlpack__()) == b"dltensor"
    assert name_of(tensor.__dlpack__(max_version=(0, 8))) == b"dltensor"
    assert name_of(tensor.__dlpack__(max_version=(1, 0))) == b"dltensor_versioned"
    assert name_of(tensor.__dlpack__(max_version=(2, 0))) == b"dltensor_versioned"


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_a_capsule_is_consumed_once(version):
    capsule = gyre.zeros((2,)).__dlpack__(max_version=version)
    first = gyre.from_dlpack(capsule)
    assert name_of(capsule).startswith(b"used_dltensor")
    with pytest.raises(gyre.Error, match="from_dlpack: the capsule was consumed before"):
        gyre.from_dlpack(capsule)
    assert first.numpy().sum() == 0


def test_other_capsules_are_refused():
    import datetime

    with pytest.raises(gyre.Error, match="datetime.datetime_CAPI.*not a DLPack tensor"):
        gyre.from_dlpack(datetime.datetime_CAPI)


def test_producers_are_asked_for_version_one_first():
    class Old(Producer):
        pass

    new, old = Producer(gyre.zeros((2,))), Old(gyre.zeros((2,)), knows_versions=False)
    assert gyre.from_dlpack(new).data_ptr == new.tensor.data_ptr
    assert [set(arguments) for arguments in new.asked] == [{"max_version"}] and new.asked[0]["max_version"][0] == 1
    assert gyre.from_dlpack(old).data_ptr == old.tensor.data_ptr
    assert gyre.from_dlpack(old).data_ptr == old.tensor.data_ptr
    asked = [set(arguments) for arguments in old.asked]  # once in vain, then no more
    assert asked == [{"max_version"}, set(), set()]


def test_errors_of_the_producer_come_through():
    class Broken(Producer):
        def __dlpack__(self, **arguments):
            raise BufferError("not today")

    with pytest.raises(BufferError, match="not today"):
        gyre.from_dlpack(Broken(gyre.zeros((2,))))


@pytest.mark.parametrize("device, words", [((2, 0), "cuda:0"), ((8, 0), "device type 8"), ((10, 0), "device type 10")])
def test_memory_of_other_devices_is_refused(device, words, encoder):
    producer = Producer(gyre.zeros((1, 1, 4)), device)
    with pytest.raises(gyre.Error, match=words):
        gyre.from_dlpack(producer, "cpu")
    with pytest.raises(gyre.Error, match=f"kv_copy: k: .*{words}"):
        gyre.kv_copy(encoder, producer, gyre.zeros((2, 1, 4)))
    assert producer.asked == [] and encoder.size == 0


def test_pinned_memory_is_the_hosts():
    producer = Producer(gyre.zeros((2,)), (3, 0))
    assert gyre.from_dlpack(producer).device.name == "cpu"


def test_wrong_dtypes_are_refused_by_name_and_given_back():
    for dtype, words in [
        (np.float64, "float64"),
        (np.uint64, "uint64"),
        (np.int8, "int8"),
        (np.uint16, "uint16"),
        (bool, "bool"),
        (np.complex64, "type code 5"),
    ]:
        array = np.zeros(3, dtype)
        gone = weakref.ref(array)
        with pytest.raises(gyre.Error, match=f"from_dlpack: .*{words}"):
            gyre.from_dlpack(array)
        del array
        gc.collect()
        assert gone() is None, dtype


def test_negative_strides_and_too_many_dimensions_are_refused():
    with pytest.raises(gyre.Error, match="negative"):
        gyre.from_dlpack(np.zeros((2, 4), np.float32)[:, ::-1])
    with pytest.raises(gyre.Error, match="at most 6"):
        gyre.from_dlpack(np.zeros((1,) * 7, np.float32))


def test_read_only_travels_in_versioned_capsules_only():
    array = np.ones(3, np.float32)
    array.flags.writeable = False
    tensor = gyre.from_numpy(array)
    with pytest.raises(BufferError, match="read-only"):
        tensor.__dlpack__()
    assert gyre.from_dlpack(tensor.__dlpack__(max_version=(1, 0))).is_read_only
    assert not gyre.from_dlpack(tensor.__dlpack__(copy=True)).is_read_only
    if np.lib.NumpyVersion(np.__version__) >= "2.1.0":
        assert gyre.from_dlpack(array).is_read_only
        assert not np.from_dlpack(tensor).flags.writeable


def test_arguments_of_export():
    tensor = gyre.zeros((2, 2))
    assert tensor.__dlpack_device__() == (1, 0)
    assert gyre.from_dlpack(tensor.__dlpack__(dl_device=(1, 0), copy=False)).data_ptr == tensor.data_ptr
    assert gyre.from_dlpack(tensor.__dlpack__(stream=-1)).data_ptr == tensor.data_ptr
    assert gyre.from_dlpack(tensor.__dlpack__(copy=True)).data_ptr != tensor.data_ptr
    with pytest.raises(BufferError, match="cpu"):
        tensor.__dlpack__(dl_device=(2, 0))
    with pytest.raises(gyre.Error, match="stream 5.*no streams"):
        tensor.__dlpack__(stream=5)


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_capsules_and_tensors_may_go_in_any_order(version):
    device = gyre.Device("cpu", pool_limit_bytes=0)
    used = device.memory().in_use_bytes
    tensor = gyre.zeros((256,), device=device)
    capsule = tensor.__dlpack__(max_version=version)
    del tensor
    assert device.memory().in_use_bytes == used + 1024
    consumer = gyre.from_dlpack(capsule, device)
    del capsule
    assert device.memory().in_use_bytes == used + 1024
    del consumer
    assert device.memory().in_use_bytes == used
    unconsumed = gyre.zeros((256,), device=device).__dlpack__(max_version=version)
    assert device.memory().in_use_bytes == used + 1024
    del unconsumed
    assert device.memory().in_use_bytes == used


def test_the_producer_lives_as_long_as_the_tensor():
    array = np.zeros(3, np.float32)
    gone = weakref.ref(array)
    tensor = gyre.from_dlpack(array)
    del array
    gc.collect()
    assert gone() is not None
    del tensor
    gc.collect()
    assert gone() is None


def test_no_growth_with_capsules(no_growth):
    tensor = gyre.zeros((4, 4))
    no_growth(lambda: (tensor.__dlpack__(), gyre.from_dlpack(tensor.__dlpack__(max_version=(1, 0)))))


def test_no_growth_with_numpy_capsules(no_growth):
    array = np.zeros((4, 4), np.float32)
    no_growth(lambda: np.from_dlpack(gyre.from_dlpack(array)))
