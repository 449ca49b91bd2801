//! Random problems and the devices to run them on.

use std::sync::OnceLock;

use burn::tensor::{DType, Device, Tensor};
use burn_vision_attention::{
    AttentionImplementation, AttentionOptions, Segments, Window, attention_varlen_by,
};
use proptest::collection::vec;
use proptest::prelude::*;
use vision_attention_tests::devices::{NamedDevice, device, device_or_skip};
use vision_attention_tests::reference::{self, Heads};

/// The devices under test; wgpu joins where a driver answers.
pub fn devices() -> &'static [NamedDevice] {
    static DEVICES: OnceLock<Vec<NamedDevice>> = OnceLock::new();
    DEVICES.get_or_init(|| {
        let cpu = ["flex", "ndarray"].map(|name| device(name).expect("a CPU device answers"));
        cpu.into_iter().chain(device_or_skip("wgpu")).collect()
    })
}

/// One call of `attention_varlen`.
#[derive(Clone, Debug)]
pub struct Problem {
    pub q: Heads,
    pub k: Heads,
    pub v: Heads,
    pub segments_q: Segments,
    pub segments_k: Segments,
    pub options: AttentionOptions,
}

impl Problem {
    pub fn new(
        seed: u64,
        lengths: &[(usize, usize)],
        (heads, kv_heads): (usize, usize),
        (head_dim, value_dim): (usize, usize),
        options: AttentionOptions,
    ) -> Self {
        let segments_q = Segments::from_lengths(lengths.iter().map(|pair| pair.0)).expect("fits");
        let segments_k = Segments::from_lengths(lengths.iter().map(|pair| pair.1)).expect("fits");
        let (tokens, keys) = (segments_q.total(), segments_k.total());
        Self {
            q: Heads::random(seed, [tokens, heads, head_dim]),
            k: Heads::random(seed + 1, [keys, kv_heads, head_dim]),
            v: Heads::random(seed + 2, [keys, kv_heads, value_dim]),
            segments_q,
            segments_k,
            options,
        }
    }

    pub fn tensors(&self, device: &Device, dtype: DType) -> [Tensor<3>; 3] {
        [&self.q, &self.k, &self.v].map(|heads| heads.to_tensor(device, dtype))
    }

    pub fn run(&self, device: &Device, implementation: AttentionImplementation) -> Heads {
        let [q, k, v] = self.tensors(device, DType::F32);
        let (segments_q, segments_k) = (&self.segments_q, &self.segments_k);
        let out =
            attention_varlen_by(implementation, q, k, v, segments_q, segments_k, &self.options);
        Heads::from_tensor(out)
    }

    pub fn reference(&self) -> (Heads, Vec<f64>) {
        let Self { q, k, v, segments_q, segments_k, options } = self;
        reference::attention_varlen(q, k, v, segments_q, segments_k, options)
    }

    /// The problem with its segments in another order.
    pub fn reordered(&self, order: &[usize]) -> Self {
        let pick = |heads: &Heads, segments: &Segments| {
            let ranges: Vec<_> = segments.ranges().collect();
            let parts: Vec<_> =
                order.iter().map(|&index| heads.tokens(ranges[index].clone())).collect();
            let lengths = order.iter().map(|&index| ranges[index].len());
            (Heads::concat(&parts), Segments::from_lengths(lengths).expect("fits"))
        };
        let (q, segments_q) = pick(&self.q, &self.segments_q);
        let (k, segments_k) = pick(&self.k, &self.segments_k);
        let (v, _) = pick(&self.v, &self.segments_k);
        Self { q, k, v, segments_q, segments_k, options: self.options }
    }
}

fn options() -> impl Strategy<Value = AttentionOptions> {
    let distance = || proptest::option::of(prop_oneof![6 => 0usize..6, 1 => Just(usize::MAX)]);
    let positive = || proptest::option::of(0.1f64..4.0);
    (any::<bool>(), distance(), distance(), positive(), positive()).prop_map(
        |(is_causal, left, right, softmax_scale, softcap)| AttentionOptions {
            softmax_scale,
            is_causal,
            window: Window { left, right },
            softcap,
        },
    )
}

pub fn problems() -> impl Strategy<Value = Problem> {
    let lengths = vec((0usize..9, 0usize..9), 1..5);
    let heads = prop_oneof![Just((1, 1)), Just((2, 2)), Just((4, 2)), Just((3, 1))];
    let dims = prop_oneof![Just((16, 16)), Just((24, 16)), Just((16, 40))];
    (any::<u32>(), lengths, heads, dims, options()).prop_map(
        |(seed, lengths, heads, dims, options)| {
            Problem::new(u64::from(seed), &lengths, heads, dims, options)
        },
    )
}

/// Segments of equal lengths on both sides, as in self-attention.
pub fn self_attention() -> impl Strategy<Value = Problem> {
    (any::<u32>(), vec(0usize..9, 1..6), options()).prop_map(|(seed, lengths, options)| {
        let lengths: Vec<_> = lengths.into_iter().map(|length| (length, length)).collect();
        Problem::new(u64::from(seed), &lengths, (2, 2), (16, 16), options)
    })
}
