"""Memory of a GPU; skipped where there is none. test_fake_cuda.py runs these on a stand-in for the driver."""

import gc
import weakref

import numpy as np
import pytest

import gyre

pytestmark = pytest.mark.skipif(
    not any(info.name == "cuda:0" and info.available for info in gyre.devices()), reason="there is no CUDA device"
)


class Producer:
    """Another library's tensor on the GPU: it exports ours and notes for which stream it was asked."""

    def __init__(self, tensor):
        self.tensor, self.streams = tensor, []

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, *, stream=None, max_version=None):
        self.streams.append(stream)
        return self.tensor.__dlpack__(stream=stream, max_version=max_version)


def filled(*shape):
    tensor = gyre.zeros(shape, device="cuda:0")
    tensor.write_from(np.arange(tensor.size, dtype=np.float32).reshape(shape))
    return tensor


def read(tensor):
    host = np.empty(tensor.shape, np.float32)
    tensor.read_to(host)
    return host


def test_host_copies():
    tensor = filled(4, 6)
    assert tensor.device.name == "cuda:0" and tensor.device == gyre.Device("cuda:0")
    assert (read(tensor[1:, ::2]) == np.arange(24).reshape(4, 6)[1:, ::2]).all()
    assert (read(tensor.copy()) == read(tensor)).all() and tensor.copy().data_ptr != tensor.data_ptr


def test_dlpack_shares_memory_in_the_order_of_the_streams():
    tensor = filled(3, 4)
    assert tensor.__dlpack_device__() == (2, 0) and tensor.device.stream != 0
    producer = Producer(tensor[1:])
    shared = gyre.from_dlpack(producer)
    assert (shared.data_ptr, shared.shape, shared.device) == (tensor[1:].data_ptr, (2, 4), tensor.device)
    assert producer.streams == [tensor.device.stream]
    shared.write_from(np.zeros((2, 4), np.float32))
    assert read(tensor)[1:].sum() == 0
    for stream in (None, 1, 2, 12345, -1):
        assert gyre.from_dlpack(tensor.__dlpack__(stream=stream)).data_ptr == tensor.data_ptr
    with pytest.raises(gyre.Error, match="stream 0 is ambiguous"):
        tensor.__dlpack__(stream=0)


def test_memory_stays_where_it_is():
    tensor = filled(2, 2)
    with pytest.raises(gyre.Error, match="cuda:0.*read_to"):
        tensor.numpy()
    with pytest.raises(gyre.Error, match="cuda:0"):
        np.asarray(tensor)
    with pytest.raises(gyre.Error, match="on cuda:0.*needed on cpu"):
        gyre.from_dlpack(Producer(tensor), "cpu")
    with pytest.raises(gyre.Error, match="on cpu.*needed on cuda:0"):
        gyre.from_dlpack(np.zeros(3, np.float32), "cuda:0")
    with pytest.raises(gyre.Error, match="on cpu.*needed on cuda:0.*write_from"):
        gyre.asarray(np.zeros(3, np.float32), "cuda:0")
    with pytest.raises(BufferError):
        tensor.__dlpack__(dl_device=(1, 0))
    with pytest.raises(gyre.Error, match="another cuda:0 device"):
        gyre.asarray(tensor, gyre.Device("cuda:0", check_each_launch=True))


def test_what_is_wrapped_is_held_until_the_work_is_done():
    class Owner:
        pass

    owner = Owner()
    gone = weakref.ref(owner)
    producer = Producer(filled(1, 1, 64))
    producer.owner = owner
    del owner
    device = gyre.Device("cuda:0")
    encoder = gyre.Encoder(device)
    cache = gyre.KvCache(device, kv_heads=1, head_dim=64, capacity=8, layers=[gyre.KvLayer("f16", "f16")])
    try:
        cache.begin_step(encoder, 1)
        cache.append(encoder, 0, producer, producer)
    except gyre.CompileFailed as error:
        pytest.skip(f"kernels cannot be compiled here: {error}")
    del producer
    gc.collect()
    assert gone() is None  # DLPack holds the memory, not the Python object around it
    encoder.submit().wait()
    encoder.device.wait()
    assert cache.length == 1


def test_no_growth(no_growth):
    tensor = gyre.zeros((4, 4), device="cuda:0")
    no_growth(lambda: gyre.from_dlpack(tensor), cycles=20_000)


def test_torch_shares_memory():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    given = torch.arange(12, dtype=torch.bfloat16, device="cuda").reshape(3, 4)
    tensor = gyre.from_dlpack(given)
    assert (tensor.data_ptr, tensor.dtype, tensor.device.name) == (given.data_ptr(), "bf16", "cuda:0")
    back = torch.from_dlpack(tensor)
    assert back.data_ptr() == given.data_ptr() and torch.equal(back, given)
    q = torch.randn(1, 8, 128, device="cuda")
    encoder = gyre.Encoder("cuda:0")
    for _ in range(20):  # the producer's kernels are in flight when the op is recorded
        q = q @ torch.eye(128, device="cuda")
        out = torch.empty_like(q)
        gyre.hadamard(encoder, q, out)
        encoder.submit().wait()
        assert torch.allclose(out.norm(dim=-1), q.norm(dim=-1), rtol=1e-4)


def test_for_lists_on_the_producers_stream_nobody_waits():
    tensor = filled(3, 4)
    producer = Producer(tensor)
    shared = gyre.from_dlpack(producer, "cuda:0", ordered=False)
    assert producer.streams == [-1] and shared.data_ptr == tensor.data_ptr
    assert gyre.AttentionScratch("cuda:0").memory is None
