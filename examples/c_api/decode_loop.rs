// decode_loop.c from Rust, with declarations of what it uses and no crate:
//   rustc decode_loop.rs -L <folder of libgyre.so> -l gyre
use std::ffi::{c_char, c_void, CStr};
use std::process::exit;
use std::ptr::{null, null_mut};

const LAYERS: usize = 2;
const HEADS: usize = 8;
const KV_HEADS: usize = 2;
const DIM: usize = 64;
const PROMPT: u64 = 100;
const STEPS: u64 = 20;
const F32: i32 = 1;
const KV_F16: i32 = 2;

type Handle = *mut c_void;

#[repr(C)]
#[derive(Clone, Copy)]
struct KvLayer {
    size: u64,
    k: i32,
    v: i32,
    window: u64,
    tail: u64,
    sink_tokens: u64,
}

#[repr(C)]
struct KvCacheOptions {
    size: u64,
    kv_heads: u64,
    head_dim: u64,
    v_head_dim: u64,
    capacity: u64,
    layers: *const KvLayer,
    layer_count: u64,
    step_tokens: u64,
}

// The fields after `v`, and after `out` below, are left away: a struct of an older version is fine.
#[repr(C)]
struct RopeAppendInputs {
    size: u64,
    q: Handle,
    q_out: Handle,
    k: Handle,
    v: Handle,
}

#[repr(C)]
struct AttendInputs {
    size: u64,
    q: Handle,
    out: Handle,
}

extern "C" {
    fn gyre_version() -> *const c_char;
    fn gyre_last_error() -> *const c_char;
    fn gyre_device_open(name: *const c_char, options: *const c_void, device: *mut Handle) -> i32;
    fn gyre_device_wait(device: Handle) -> i32;
    fn gyre_device_destroy(device: Handle);
    fn gyre_tensor_create(device: Handle, dtype: i32, rank: u32, shape: *const u64, tensor: *mut Handle) -> i32;
    fn gyre_tensor_write(tensor: Handle, source: *const c_void, bytes: u64) -> i32;
    fn gyre_tensor_read(tensor: Handle, target: *mut c_void, bytes: u64) -> i32;
    fn gyre_tensor_destroy(tensor: Handle);
    fn gyre_encoder_create(device: Handle, encoder: *mut Handle) -> i32;
    fn gyre_encoder_submit(encoder: Handle, fence: *mut Handle) -> i32;
    fn gyre_encoder_instantiate(encoder: Handle, graph: *mut Handle) -> i32;
    fn gyre_encoder_destroy(encoder: Handle);
    fn gyre_graph_replay(graph: Handle, fence: *mut Handle) -> i32;
    fn gyre_graph_destroy(graph: Handle);
    fn gyre_kv_cache_create(device: Handle, options: *const KvCacheOptions, cache: *mut Handle) -> i32;
    fn gyre_kv_cache_length(cache: Handle, tokens: *mut u64) -> i32;
    fn gyre_kv_cache_begin_step(cache: Handle, encoder: Handle, tokens: u64) -> i32;
    fn gyre_kv_cache_rope_append(
        cache: Handle,
        encoder: Handle,
        layer: u64,
        inputs: *const RopeAppendInputs,
        options: *const c_void,
    ) -> i32;
    fn gyre_kv_cache_attend(
        cache: Handle,
        encoder: Handle,
        layer: u64,
        inputs: *const AttendInputs,
        options: *const c_void,
    ) -> i32;
    fn gyre_kv_cache_destroy(cache: Handle);
}

fn text(pointer: *const c_char) -> String {
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

fn check(status: i32) {
    if status != 0 {
        eprintln!("{}", text(unsafe { gyre_last_error() }));
        exit(1);
    }
}

// A handle that destroys itself.
struct Owned(Handle, unsafe extern "C" fn(Handle));

impl Owned {
    fn new(destroy: unsafe extern "C" fn(Handle), make: impl FnOnce(*mut Handle) -> i32) -> Owned {
        let mut handle = null_mut();
        check(make(&mut handle));
        Owned(handle, destroy)
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        unsafe { (self.1)(self.0) }
    }
}

fn tensor(device: &Owned, tokens: u64, heads: usize) -> Owned {
    let shape = [tokens, heads as u64, DIM as u64];
    Owned::new(gyre_tensor_destroy, |out| unsafe {
        gyre_tensor_create(device.0, F32, 3, shape.as_ptr(), out)
    })
}

struct Step {
    q: Owned,
    k: Owned,
    v: Owned,
    out: Owned,
}

impl Step {
    fn new(device: &Owned, tokens: u64) -> Step {
        Step {
            q: tensor(device, tokens, HEADS),
            k: tensor(device, tokens, KV_HEADS),
            v: tensor(device, tokens, KV_HEADS),
            out: tensor(device, tokens, HEADS),
        }
    }

    // Stands in for a model: value i is i everywhere; queries and keys are 0.
    fn fill(&self, first: u64, tokens: u64) {
        let row = KV_HEADS * DIM;
        let numbers: Vec<f32> =
            (0..tokens as usize * row).map(|i| (first + (i / row) as u64) as f32).collect();
        check(unsafe {
            gyre_tensor_write(self.v.0, numbers.as_ptr().cast(), 4 * numbers.len() as u64)
        });
    }

    fn record(&self, cache: &Owned, encoder: &Owned) {
        let append = RopeAppendInputs {
            size: std::mem::size_of::<RopeAppendInputs>() as u64,
            q: self.q.0,
            q_out: self.q.0,
            k: self.k.0,
            v: self.v.0,
        };
        let attend = AttendInputs {
            size: std::mem::size_of::<AttendInputs>() as u64,
            q: self.q.0,
            out: self.out.0,
        };
        for layer in 0..LAYERS as u64 {
            check(unsafe { gyre_kv_cache_rope_append(cache.0, encoder.0, layer, &append, null()) });
            check(unsafe { gyre_kv_cache_attend(cache.0, encoder.0, layer, &attend, null()) });
        }
    }
}

fn main() {
    let device = Owned::new(gyre_device_destroy, |out| unsafe {
        gyre_device_open(b"cpu\0".as_ptr().cast(), null(), out)
    });
    let encoder =
        Owned::new(gyre_encoder_destroy, |out| unsafe { gyre_encoder_create(device.0, out) });
    let layer_size = std::mem::size_of::<KvLayer>() as u64;
    let layers =
        [KvLayer { size: layer_size, k: 0, v: KV_F16, window: 0, tail: 0, sink_tokens: 0 }; LAYERS];
    let options = KvCacheOptions {
        size: std::mem::size_of::<KvCacheOptions>() as u64,
        kv_heads: KV_HEADS as u64,
        head_dim: DIM as u64,
        v_head_dim: 0,
        capacity: 256,
        layers: layers.as_ptr(),
        layer_count: LAYERS as u64,
        step_tokens: 0,
    };
    let cache = Owned::new(gyre_kv_cache_destroy, |out| unsafe {
        gyre_kv_cache_create(device.0, &options, out)
    });

    let (prompt, step) = (Step::new(&device, PROMPT), Step::new(&device, 1));
    prompt.fill(0, PROMPT);
    check(unsafe { gyre_kv_cache_begin_step(cache.0, encoder.0, PROMPT) });
    prompt.record(&cache, &encoder);
    check(unsafe { gyre_encoder_submit(encoder.0, null_mut()) });

    step.record(&cache, &encoder);
    let graph =
        Owned::new(gyre_graph_destroy, |out| unsafe { gyre_encoder_instantiate(encoder.0, out) });
    for token in PROMPT..PROMPT + STEPS {
        step.fill(token, 1);
        check(unsafe { gyre_kv_cache_begin_step(cache.0, encoder.0, 1) });
        check(unsafe { gyre_encoder_submit(encoder.0, null_mut()) });
        check(unsafe { gyre_graph_replay(graph.0, null_mut()) });
        check(unsafe { gyre_device_wait(device.0) });
    }

    let (mut out, mut length) = ([0f32; HEADS * DIM], 0u64);
    check(unsafe { gyre_kv_cache_length(cache.0, &mut length) });
    check(unsafe { gyre_tensor_read(step.out.0, out.as_mut_ptr().cast(), 4 * out.len() as u64) });
    println!("Gyre {}: {} tokens, their mean is {:.1}", text(unsafe { gyre_version() }), length, out[0]);
}
