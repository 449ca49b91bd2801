//! Launching attention with a producer.

use std::sync::Arc;

use cubecl::{client::Client, prelude::*};

use super::{
    AttentionBlueprint, AttentionProblem, AttentionTensors, kernel::Scalars,
    kernel_async::attention_varlen_async, launch::scalars,
};
use crate::{
    DeviceWorkList,
    device::{buffer_arg, kernel_settings, tensor_arg},
    tile::RingAlgebra,
    work_list::TILE_WORDS,
};

/// Queues a launch that [`launch`](super::launch()) has checked.
pub(super) fn run_async<T: RingAlgebra>(
    client: &Client,
    grid: CubeCount,
    problem: &AttentionProblem,
    blueprint: &AttentionBlueprint,
    work: &DeviceWorkList,
    tensors: AttentionTensors,
) {
    let (scalars, query_factor) = scalars(problem, work);
    let AttentionTensors { q, k, v, out, lse } = tensors;
    // Empty buffers cannot be bound. Without key tokens the kernel never reads k and v: the work list,
    // at the start of its allocation, stands in for them as one token of 16 bytes.
    let (k, v) = if problem.tokens_k() == 0 {
        let (shape, strides) = (vec![1, 1, 8].into(), vec![8, 8, 1].into());
        // SAFETY: the work list has at least 20 bytes, and nothing is read.
        let any = unsafe { TensorBinding::from_raw_parts(work.handle.clone(), strides, shape) };
        (any.clone(), any)
    } else {
        (k, v)
    };
    let argument = |tensor| T::argument(tensor, blueprint.tile_k(), blueprint.dtype);
    // SAFETY: as for the other kernel. Copies reach no further than the tensors, whatever they ask for,
    // and each is waited for by the loop that has begun it.
    unsafe {
        attention_varlen_async::launch_unchecked::<T>(
            client,
            grid,
            CubeDim::new_1d(blueprint.units() as u32),
            blueprint.address_type,
            q.into_tensor_arg(),
            argument(k),
            argument(v),
            BufferArg::from_raw_parts(work.handle.clone(), work.tiles * TILE_WORDS),
            out.into_buffer_arg(),
            lse.into_buffer_arg(),
            scalars,
            query_factor,
            f32::NEG_INFINITY,
            *blueprint,
            blueprint.dtype,
            blueprint.vectors[0],
            blueprint.vectors[1],
            blueprint.vectors[2],
        );
    }
}

/// The kernel of a blueprint.
pub(super) fn async_kernel<T: RingAlgebra>(
    blueprint: AttentionBlueprint,
    properties: Arc<DeviceProperties>,
    target: Arc<TargetProperties>,
) -> Box<dyn CubeKernel> {
    let settings = kernel_settings(blueprint.units(), blueprint.address_type);
    let [vector_q, vector_k, vector_v] = blueprint.vectors;
    Box::new(attention_varlen_async::AttentionVarlenAsync::<T>::new(
        settings,
        properties,
        target,
        tensor_arg(),
        T::compiled(),
        T::compiled(),
        buffer_arg(),
        buffer_arg(),
        buffer_arg(),
        Scalars::compiled(),
        (),
        (),
        blueprint,
        blueprint.dtype,
        vector_q,
        vector_k,
        vector_v,
    ))
}
