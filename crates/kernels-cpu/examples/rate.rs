//! Speed of the kernels beside this machine's own yardsticks: the rate of a large matrix product for
//! attention, a copy of the same bytes for norm and rotation.
//!
//! `cargo run --release -p kernels-cpu --example rate [-- THREADS [FILTER]]`; one thread by default,
//! 0 for all. A kernel and its yardstick take turns, and the best of each counts, so that other work
//! on the machine disturbs the ratios little. For the same reason a single thread on Linux is timed by
//! the processor time that it got.

use std::hint::black_box;
use std::time::{Duration, Instant};

use kernels_cpu::attention_varlen::{backward, forward};
use kernels_cpu::linear::{self, Linear};
use kernels_cpu::rope_qk_norm::{self, GradientBuffers, NormWeight, RmsNorm, RotaryTables};
use kernels_cpu::{
    Attention, AttentionOptions, Gradients, InstructionSet, OutputGradient, View, ViewMut,
};

/// Turns that each program takes at least, and the seconds after which no other turn begins.
const ROUNDS: usize = 7;
const SECONDS: f64 = 4.0;
/// Rows and columns of the yardstick's matrices.
const MATRIX: usize = 1536;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let threads = arguments.next().map_or(1, |threads| threads.parse().expect("THREADS: a number"));
    let filter = arguments.next().unwrap_or_default();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a thread pool");
    pool.install(|| {
        let threads = rayon::current_num_threads();
        println!("{:?}, {threads} threads", InstructionSet::current());
        println!("{:<34} {:>9} {:>9} {:>6}", "", "GFLOP/s", "gemm", "ratio");
        let selected = |name: &str| name.contains(&filter);
        for (segments, length) in [(1, 4096), (4, 1024), (64, 64)] {
            for (heads, head_dim) in [(24, 64), (16, 72), (16, 80), (12, 128)] {
                let name = format!("{segments}x{length} {heads}h {head_dim}");
                attention(&name, segments, length, heads, head_dim, selected);
            }
        }
        for (heads, head_dim) in [(24, 64), (16, 72), (16, 80)] {
            for parts in [3, 1] {
                let name = format!("linear 4096 {}x{}", heads * head_dim, parts * heads * head_dim);
                if selected(&name) {
                    projection(&name, 4096, heads * head_dim, parts * heads * head_dim);
                }
            }
        }
        for head_dim in [64, 80, 128] {
            let name = format!("rope 4096 16h {head_dim}");
            if selected(&name) {
                rope(&name, 4096, 16, head_dim);
            }
        }
    });
}

fn attention(
    name: &str,
    segments: usize,
    length: usize,
    heads: usize,
    head_dim: usize,
    selected: impl Fn(&str) -> bool,
) {
    let names = [format!("{name} forward"), format!("{name} backward")];
    let [is_forward, is_backward] = names.each_ref().map(|name| selected(name));
    if !is_forward && !is_backward {
        return;
    }
    let tokens = segments * length;
    let width = heads * head_dim;
    let qkv = numbers(tokens * 3 * width);
    let shape = [tokens, heads, head_dim];
    let part = |part: usize| {
        View::new(&qkv, part * width, shape, [3 * width as isize, head_dim as isize, 1])
    };
    let offsets: Vec<_> = (0..=segments).map(|i| (i * length) as i32).collect();
    let attention = Attention {
        q: part(0),
        k: part(1),
        v: part(2),
        offsets_q: &offsets,
        offsets_k: &offsets,
        options: AttentionOptions::new(1.0 / (head_dim as f64).sqrt()),
    };
    let d_out = numbers(tokens * width);
    let (mut out, mut lse) = (vec![0.0; tokens * width], vec![0.0; tokens * heads]);
    let mut gradients = vec![0.0; tokens * 3 * width];
    let product = 2.0 * (segments * length * length * heads * head_dim) as f64;

    forward(&attention, &mut out, &mut lse);
    if is_forward {
        let (forward_time, gemm_time) =
            alternate(&mut Gemm::new(), || forward(&attention, &mut out, &mut lse));
        report(&names[0], 2.0 * product, forward_time, gemm_time);
    }
    if !is_backward {
        return;
    }
    let output = OutputGradient {
        out: View::contiguous(&out, shape),
        lse: &lse,
        d_out: View::contiguous(&d_out, shape),
        d_lse: None,
    };
    let (backward_time, gemm_time) = alternate(&mut Gemm::new(), || {
        backward(&attention, &output, Gradients::Packed(&mut gradients));
    });
    report(&names[1], 5.0 * product, backward_time, gemm_time);
}

fn projection(name: &str, tokens: usize, inputs: usize, outputs: usize) {
    let (x, weight) = (numbers(tokens * inputs), numbers(inputs * outputs));
    let mut out = vec![0.0; tokens * outputs];
    let x = View::contiguous(&x, [tokens, 1, inputs]);
    let weight = View::contiguous(&weight, [inputs, 1, outputs]);
    let run = || {
        let out = ViewMut::contiguous(&mut out, [tokens, 1, outputs]);
        linear::forward(&x, &Linear { weight, bias: None }, out);
    };
    let (time, gemm_time) = alternate(&mut Gemm::new(), run);
    report(name, 2.0 * (tokens * inputs * outputs) as f64, time, gemm_time);
}

fn rope(name: &str, tokens: usize, heads: usize, head_dim: usize) {
    let width = heads * head_dim;
    let shape = [tokens, heads, head_dim];
    let qkv = numbers(tokens * 3 * width);
    let strides = [3 * width as isize, head_dim as isize, 1];
    let [q, k] = [0, 1].map(|part| View::new(&qkv, part * width, shape, strides));
    let (cos, sin) = (numbers(tokens * head_dim / 2), numbers(tokens * head_dim / 2));
    let tables = RotaryTables { cos: &cos, sin: &sin };
    let weight = numbers(head_dim);
    let norm = RmsNorm { weight: NormWeight::Input(&weight), epsilon: 1e-6 };
    let [mut q_out, mut k_out] = [0, 1].map(|_| vec![0.0; tokens * width]);
    let mut copies = [0, 1].map(|_| vec![0.0; tokens * width]);
    let mut copy = || {
        // The same bytes: two of three parts of each token's row, in as many threads.
        for (part, copy) in copies.iter_mut().enumerate() {
            copy_part(&qkv, part, width, copy);
        }
        black_box(&copies);
    };
    for (what, norm) in [("rope", None), ("rope + norm", Some(&norm))] {
        let run = || {
            for (x, out) in [(&q, &mut q_out), (&k, &mut k_out)] {
                let out = ViewMut::contiguous(out, shape);
                rope_qk_norm::forward(x, norm, Some(&tables), out);
            }
        };
        let (time, copy_time) = alternate(&mut copy, run);
        println!(
            "{:<34} {:.3} ms, copy {:.3} ms, ratio {:.2}",
            format!("{name} {what}"),
            time * 1e3,
            copy_time * 1e3,
            time / copy_time
        );
        let mut gradients = vec![0.5; tokens * 3 * width];
        let run = || {
            for (part, x) in [&q, &k].into_iter().enumerate() {
                let slot = ViewMut::new(&mut gradients, part * width, shape, [3 * width, head_dim]);
                let slot = GradientBuffers::InPlace(slot);
                black_box(rope_qk_norm::backward(x, norm, Some(&tables), slot));
            }
        };
        let (time, copy_time) = alternate(&mut copy, run);
        println!(
            "{:<34} {:.3} ms, copy {:.3} ms, ratio {:.2}",
            format!("{name} {what} backward"),
            time * 1e3,
            copy_time * 1e3,
            time / copy_time
        );
    }
}

/// Copies one of three parts of each row of `from`.
fn copy_part(from: &[f32], part: usize, width: usize, to: &mut [f32]) {
    use rayon::prelude::*;
    to.par_chunks_mut(64 * width).zip(from.par_chunks(64 * 3 * width)).for_each(|(to, from)| {
        for (to, from) in to.chunks_mut(width).zip(from.chunks(3 * width)) {
            to.copy_from_slice(&from[part * width..][..width]);
        }
    });
}

/// Best times of `run` and of the yardstick, which take turns.
fn alternate(yardstick: &mut dyn Yardstick, mut run: impl FnMut()) -> (f64, f64) {
    let (mut best, mut best_yardstick) = (f64::INFINITY, f64::INFINITY);
    let begin = Instant::now();
    for round in 0.. {
        if round >= ROUNDS && begin.elapsed().as_secs_f64() > SECONDS {
            break;
        }
        best = best.min(seconds(&mut run));
        best_yardstick = best_yardstick.min(seconds(|| yardstick.run()));
    }
    (best, best_yardstick)
}

fn seconds(run: impl FnOnce()) -> f64 {
    let clock = if rayon::current_num_threads() == 1 { thread_time } else { || None };
    let (start, start_of_thread) = (Instant::now(), clock());
    run();
    let of_thread = clock().zip(start_of_thread).map(|(end, start)| end - start);
    of_thread.unwrap_or_else(|| start.elapsed()).as_secs_f64()
}

/// Processor time of the calling thread.
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
fn thread_time() -> Option<Duration> {
    const CLOCK_THREAD_CPUTIME_ID: i32 = 3;
    unsafe extern "C" {
        fn clock_gettime(clock: i32, time: *mut [i64; 2]) -> i32;
    }
    let mut time = [0; 2];
    // SAFETY: on 64-bit Linux `timespec` is seconds and nanoseconds, 64 bits each.
    let status = unsafe { clock_gettime(CLOCK_THREAD_CPUTIME_ID, &mut time) };
    (status == 0).then(|| Duration::new(time[0] as u64, time[1] as u32))
}

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
fn thread_time() -> Option<Duration> {
    None
}

trait Yardstick {
    fn run(&mut self);
}

impl<F: FnMut()> Yardstick for F {
    fn run(&mut self) {
        self();
    }
}

/// One large f32 matrix product.
struct Gemm {
    a: Vec<f32>,
    b: Vec<f32>,
    c: Vec<f32>,
}

impl Gemm {
    fn new() -> Self {
        let [a, b, c] = [0, 1, 2].map(|_| numbers(MATRIX * MATRIX));
        Self { a, b, c }
    }

    fn flop() -> f64 {
        2.0 * (MATRIX as f64).powi(3)
    }
}

impl Yardstick for Gemm {
    fn run(&mut self) {
        let n = MATRIX as isize;
        // SAFETY: each matrix has MATRIX rows of MATRIX numbers.
        unsafe {
            gemm::gemm(
                MATRIX,
                MATRIX,
                MATRIX,
                self.c.as_mut_ptr(),
                n,
                1,
                false,
                self.a.as_ptr(),
                n,
                1,
                self.b.as_ptr(),
                n,
                1,
                0.0,
                1.0,
                false,
                false,
                false,
                gemm::Parallelism::Rayon(0),
            );
        }
    }
}

fn report(name: &str, flop: f64, time: f64, gemm_time: f64) {
    let (rate, gemm_rate) = (flop / time * 1e-9, Gemm::flop() / gemm_time * 1e-9);
    println!("{name:<34} {rate:>9.1} {gemm_rate:>9.1} {:>6.2}", rate / gemm_rate);
}

/// Reproducible numbers in -1..1.
fn numbers(len: usize) -> Vec<f32> {
    let mut state = len as u32 | 1;
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(next).collect()
}
