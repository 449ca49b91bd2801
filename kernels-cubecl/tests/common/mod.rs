//! Device access, tensors with guard regions, and number generation shared by the kernel tests.
#![allow(dead_code, clippy::unwrap_used)]

use cubecl::{
    Device,
    client::Client,
    device::WgpuDeviceKind,
    ir::{ElemType, FloatKind},
    prelude::TensorBinding,
    server::Handle,
};
use half::{bf16, f16};
use kernels_cubecl::TensorLayout;

pub const F32: ElemType = ElemType::Float(FloatKind::F32);
pub const F16: ElemType = ElemType::Float(FloatKind::F16);
pub const BF16: ElemType = ElemType::Float(FloatKind::BF16);

/// Elements on both sides of every buffer that no kernel may touch.
pub const GUARD: usize = 1024;

/// The device that tests run on: `VISION_ATTENTION_TEST_DEVICE` (wgpu, cpu or cuda), or the one that the
/// features bring.
pub fn device_name() -> String {
    std::env::var("VISION_ATTENTION_TEST_DEVICE").unwrap_or_else(|_| {
        let name = match () {
            _ if cfg!(feature = "cuda") => "cuda",
            _ if cfg!(feature = "cpu") => "cpu",
            _ => "wgpu",
        };
        name.to_owned()
    })
}

/// That device, or `None` with a message where there is none. Where
/// `VISION_ATTENTION_REQUIRE_GPU_TESTS=1` is set, having none is a failure.
pub fn client() -> Option<Client> {
    let device = match device_name().as_str() {
        "cuda" => Device::cuda(0),
        "cpu" => Device::cpu(),
        "wgpu" => Device::wgpu(WgpuDeviceKind::DefaultDevice),
        name => panic!("VISION_ATTENTION_TEST_DEVICE `{name}`: expected wgpu, cpu or cuda"),
    };
    match device {
        Ok(device) => Some(device.client()),
        Err(error) => {
            assert!(!required("GPU_TESTS"), "no device: {error}");
            println!("skipped: {error}");
            None
        }
    }
}

/// Whether `VISION_ATTENTION_REQUIRE_<what>` is 1.
pub fn required(what: &str) -> bool {
    std::env::var(format!("VISION_ATTENTION_REQUIRE_{what}")).as_deref() == Ok("1")
}

/// Element types that the tests store.
pub fn encode(dtype: ElemType, values: impl IntoIterator<Item = f64>) -> Vec<u8> {
    let values = values.into_iter();
    match dtype {
        F32 => values.flat_map(|x| (x as f32).to_le_bytes()).collect(),
        F16 => values.flat_map(|x| f16::from_f64(x).to_le_bytes()).collect(),
        BF16 => values.flat_map(|x| bf16::from_f64(x).to_le_bytes()).collect(),
        _ => panic!("{dtype} is not tested"),
    }
}

pub fn decode(dtype: ElemType, bytes: &[u8]) -> Vec<f64> {
    let pairs = || bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
    match dtype {
        F32 => bytes
            .chunks_exact(4)
            .map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap())))
            .collect(),
        F16 => pairs().map(|b| f16::from_le_bytes(b).to_f64()).collect(),
        BF16 => pairs().map(|b| bf16::from_le_bytes(b).to_f64()).collect(),
        _ => panic!("{dtype} is not tested"),
    }
}

/// `x` rounded to the element type.
pub fn round(dtype: ElemType, x: f64) -> f64 {
    match dtype {
        F32 => f64::from(x as f32),
        F16 => f16::from_f64(x).to_f64(),
        BF16 => bf16::from_f64(x).to_f64(),
        _ => panic!("{dtype} is not tested"),
    }
}

/// Reproducible numbers, roughly normal.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x1234_5678_9ABC_DEF1)
    }

    fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Uniform in `low..=high`.
    pub fn int(&mut self, low: usize, high: usize) -> usize {
        low + (self.bits() >> 11) as usize % (high - low + 1)
    }

    /// Sum of four uniforms, scaled to variance 1.
    pub fn normal(&mut self) -> f64 {
        let uniform = |r: &mut Self| (r.bits() >> 11) as f64 / (1u64 << 53) as f64 - 0.5;
        (0..4).map(|_| uniform(self)).sum::<f64>() * 3f64.sqrt()
    }

    pub fn normals(&mut self, dtype: ElemType, count: usize) -> Vec<f64> {
        (0..count).map(|_| round(dtype, self.normal())).collect()
    }
}

/// Writes logical values `[shape]` into a buffer by strides. Everything else is NaN, so that a read
/// outside of the tensor shows.
pub fn upload(
    client: &Client,
    dtype: ElemType,
    values: &[f64],
    layout: TensorLayout,
) -> TensorBinding {
    let mut memory = vec![f64::NAN; GUARD + layout.span() + GUARD];
    let [tokens, heads, dim] = layout.shape;
    assert_eq!(values.len(), tokens * heads * dim);
    for (i, &value) in values.iter().enumerate() {
        let index = [i / (heads * dim), i / dim % heads, i % dim];
        let at: usize = (0..3).map(|a| index[a] * layout.strides[a]).sum();
        memory[GUARD + at] = value;
    }
    let size = dtype.size();
    let handle = client
        .create_from_slice(&encode(dtype, memory))
        .offset_start((GUARD * size) as u64)
        .offset_end((GUARD * size) as u64);
    binding(&handle, &layout.shape, &layout.strides)
}

pub fn binding(handle: &Handle, shape: &[usize], strides: &[usize]) -> TensorBinding {
    // SAFETY: the kernels under test check shape and strides against the buffer themselves.
    unsafe {
        TensorBinding::from_raw_parts(
            handle.clone(),
            strides.to_vec().into(),
            shape.to_vec().into(),
        )
    }
}

/// An output full of NaN between two guard regions.
pub struct Output {
    whole: Handle,
    dtype: ElemType,
    shape: Vec<usize>,
}

/// Every byte of an output before a kernel writes it: NaN in all element types.
pub const POISON: u8 = 0xFF;

impl Output {
    pub fn new(client: &Client, dtype: ElemType, shape: &[usize]) -> Self {
        let elements = GUARD + shape.iter().product::<usize>() + GUARD;
        Self {
            whole: client.create_from_slice(&vec![POISON; elements * dtype.size()]),
            dtype,
            shape: shape.to_vec(),
        }
    }

    pub fn binding(&self) -> TensorBinding {
        let guard = (GUARD * self.dtype.size()) as u64;
        let handle = self.whole.clone().offset_start(guard).offset_end(guard);
        let mut strides = vec![1; self.shape.len()];
        for axis in (1..self.shape.len()).rev() {
            strides[axis - 1] = strides[axis] * self.shape[axis];
        }
        binding(&handle, &self.shape, &strides)
    }

    /// The bytes between the guards, after checking these.
    pub fn bytes(&self, client: &Client) -> Vec<u8> {
        let bytes = client.read_one(self.whole.clone()).unwrap();
        let guard = GUARD * self.dtype.size();
        let end = guard + self.shape.iter().product::<usize>() * self.dtype.size();
        assert!(bytes[..guard].iter().all(|&b| b == POISON), "guard before");
        assert!(bytes[end..end + guard].iter().all(|&b| b == POISON), "guard after");
        bytes[guard..end].to_vec()
    }

    pub fn read(&self, client: &Client) -> Vec<f64> {
        decode(self.dtype, &self.bytes(client))
    }
}

/// `max |a - b|`; NaN if either holds one where the other does not.
pub fn max_error(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(a, b)| if a == b { 0.0 } else { (a - b).abs() })
        .fold(0.0, |max, e| if e.is_nan() || max.is_nan() { f64::NAN } else { e.max(max) })
}
