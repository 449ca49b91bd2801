//! Tensors in the memory of [`Buffer`]s, which is used again when they are dropped.

use std::mem::MaybeUninit;

use burn::backend::flex::{FlexTensor, Layout};
use burn::tensor::{DType, Shape};
use burn_std::{AccessError, AccessPolicy, AllocationController, AllocationProperty, Bytes};
use kernels_cpu::{Buffer, Element};

struct Reused<T>(Buffer<T>);

impl<T: Element> AllocationController for Reused<T> {
    fn alloc_align(&self) -> usize {
        align_of::<T>()
    }

    fn property(&self) -> AllocationProperty {
        AllocationProperty::Other
    }

    unsafe fn memory_mut(
        &mut self,
        _policy: AccessPolicy,
    ) -> Result<&mut [MaybeUninit<u8>], AccessError> {
        let bytes = size_of_val(&*self.0);
        // SAFETY: these are the bytes of the buffer, into which the caller promises to write numbers.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), bytes) })
    }

    fn memory(&self, _policy: AccessPolicy) -> Result<&[MaybeUninit<u8>], AccessError> {
        let bytes = size_of_val(&*self.0);
        // SAFETY: these are the bytes of the buffer.
        Ok(unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), bytes) })
    }
}

/// A contiguous tensor.
pub(super) fn tensor<T: Element>(elements: Buffer<T>, shape: Shape, dtype: DType) -> FlexTensor {
    let bytes = size_of_val(&*elements);
    // SAFETY: every byte of a buffer is initialised.
    let bytes = unsafe { Bytes::from_controller(Box::new(Reused(elements)), bytes) };
    FlexTensor::new(bytes, Layout::contiguous(shape), dtype)
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::bf16;

    /// `Bytes` say that they can be sent and shared, whatever lies behind them.
    const _: () = {
        const fn is_shared<T: Send + Sync>() {}
        is_shared::<Reused<f64>>();
    };

    fn numbers(len: usize) -> FlexTensor {
        let mut buffer = Buffer::<f32>::new(len);
        buffer.iter_mut().zip(0..).for_each(|(x, i)| *x = i as f32);
        tensor(buffer, Shape::new([len]), DType::F32)
    }

    #[test]
    fn a_tensor_is_read_copied_and_changed() {
        let len = (1 << 18) + 1;
        let mut first = numbers(len);
        let second = FlexTensor::new(
            Bytes::clone(&first.data_arc()),
            Layout::contiguous(Shape::new([len])),
            DType::F32,
        );
        first.storage_mut::<f32>()[7] = -1.0;
        assert_eq!(first.storage::<f32>()[6..9], [6.0, -1.0, 8.0]);
        assert_eq!(second.storage::<f32>()[6..9], [6.0, 7.0, 8.0]);
        // Longer than the buffer: the bytes move to memory of their own.
        let mut longer = Bytes::clone(&first.data_arc());
        longer.extend_from_byte_slice(&[1, 2, 3, 4]);
        assert_eq!(longer[4 * len..], [1, 2, 3, 4]);
        let elements = second.into_data().try_into_vec::<f32>();
        assert_eq!(elements.expect("the data are f32").len(), len);
    }

    #[test]
    fn small_and_empty_tensors_are_tensors() {
        let mut buffer = Buffer::<bf16>::new(3);
        buffer.fill(bf16::ONE);
        let ones = tensor(buffer, Shape::new([3]), DType::BF16);
        assert_eq!(ones.storage::<bf16>(), [bf16::ONE; 3]);
        assert_eq!(Bytes::clone(&ones.data_arc()).align(), align_of::<bf16>());
        let none = tensor(Buffer::<bf16>::new(0), Shape::new([0, 4]), DType::BF16);
        assert!(none.storage::<bf16>().is_empty());
    }
}
