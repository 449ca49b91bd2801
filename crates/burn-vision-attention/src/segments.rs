//! The boundaries of a packed batch.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{Int, Tensor};
use thiserror::Error;

/// Where each segment (a frame, an image, a document) of a packed token sequence begins and ends.
///
/// Holds what flash-attention calls `cu_seqlens`: `n + 1` offsets of which the first is 0 and the
/// last the number of tokens. It lives on the host, is validated once when it is made, and is
/// cheap to clone; every consumer then trusts it. No function of this crate takes a `max_seqlen`:
/// it is derived from the offsets, so it cannot be wrong. Empty segments are legal.
///
/// ```
/// use burn_vision_attention::Segments;
///
/// let segments = Segments::from_offsets(&[0, 24, 32, 40], 40)?;
/// assert_eq!(segments.lengths().collect::<Vec<_>>(), [24, 8, 8]);
/// assert_eq!(segments.max_len(), 24);
/// # Ok::<(), burn_vision_attention::SegmentsError>(())
/// ```
#[derive(Clone)]
pub struct Segments(Arc<Boundaries>);

struct Boundaries {
    offsets: Box<[i32]>,
    max_len: usize,
    /// What kernels derived from the offsets last, for all layers that share these segments.
    #[cfg(feature = "cube")]
    derived: std::sync::Mutex<Vec<Arc<dyn std::any::Any + Send + Sync>>>,
}

impl PartialEq for Segments {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.offsets() == other.offsets()
    }
}

impl Eq for Segments {}

impl fmt::Debug for Segments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Segments").field(&self.offsets()).finish()
    }
}

/// Why a list of offsets or lengths does not describe a packed batch.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SegmentsError {
    /// The list of offsets has no entry; even a batch without segments has the offset 0.
    #[error("cu_seqlens is empty: it must hold at least the offset 0")]
    Empty,
    /// The first offset is not 0.
    #[error("cu_seqlens[0] is {first}: the first segment must begin at token 0")]
    DoesNotStartAtZero {
        /// The offset found.
        first: i64,
    },
    /// An offset is negative.
    #[error("cu_seqlens[{index}] is {value}: offsets count tokens and cannot be negative")]
    Negative {
        /// Position in the list.
        index: usize,
        /// The offset found.
        value: i64,
    },
    /// An offset is smaller than the one before it.
    #[error(
        "cu_seqlens[{index}] is {value}, below cu_seqlens[{before}] = {previous}: offsets are cumulative \
         (for lengths use Segments::from_lengths)",
        before = index - 1
    )]
    Decreases {
        /// Position in the list.
        index: usize,
        /// The offset before it.
        previous: i64,
        /// The offset found.
        value: i64,
    },
    /// The last offset is not the number of tokens.
    #[error(
        "cu_seqlens ends at {last} but there are {total} tokens: every token must belong to one segment"
    )]
    DoesNotEndAtTotal {
        /// The last offset.
        last: i64,
        /// The number of tokens.
        total: usize,
    },
    /// An offset does not fit the 32-bit integers that devices use for `cu_seqlens`.
    #[error(
        "cu_seqlens[{index}] is {value}, over the limit of {} tokens a batch: split the batch",
        i32::MAX
    )]
    TooLong {
        /// Position in the list.
        index: usize,
        /// The offset found, in tokens.
        value: u64,
    },
    /// The tensor of offsets could not be read from its device.
    #[error("cu_seqlens could not be read from its device: {0}")]
    Unreadable(String),
}

impl Segments {
    /// Segments of the given lengths (in tokens), one after another.
    ///
    /// # Errors
    ///
    /// [`SegmentsError::TooLong`] when the sum passes `i32::MAX` tokens.
    pub fn from_lengths(lengths: impl IntoIterator<Item = usize>) -> Result<Self, SegmentsError> {
        let mut offsets = vec![0i32];
        let mut end = 0u64;
        for length in lengths {
            end = end.saturating_add(length as u64);
            let offset = i32::try_from(end)
                .map_err(|_| SegmentsError::TooLong { index: offsets.len(), value: end })?;
            offsets.push(offset);
        }
        Ok(Self::trusted(offsets))
    }

    /// Segments from cumulative offsets, `cu_seqlens`, over a batch of `total` tokens.
    ///
    /// # Errors
    ///
    /// When the offsets are empty, do not start at 0, decrease, are negative, do not end at
    /// `total`, or pass `i32::MAX`.
    pub fn from_offsets(cu_seqlens: &[i64], total: usize) -> Result<Self, SegmentsError> {
        let (&first, &last) = match (cu_seqlens.first(), cu_seqlens.last()) {
            (Some(first), Some(last)) => (first, last),
            _ => return Err(SegmentsError::Empty),
        };
        if let Some(index) = cu_seqlens.iter().position(|&offset| offset < 0) {
            let value = cu_seqlens[index];
            return Err(SegmentsError::Negative { index, value });
        }
        if first != 0 {
            return Err(SegmentsError::DoesNotStartAtZero { first });
        }
        let mut offsets = Vec::with_capacity(cu_seqlens.len());
        let mut previous = 0;
        for (index, &value) in cu_seqlens.iter().enumerate() {
            if value < previous {
                return Err(SegmentsError::Decreases { index, previous, value });
            }
            let offset = i32::try_from(value)
                .map_err(|_| SegmentsError::TooLong { index, value: value.unsigned_abs() })?;
            offsets.push(offset);
            previous = value;
        }
        if last.unsigned_abs() != total as u64 {
            return Err(SegmentsError::DoesNotEndAtTotal { last, total });
        }
        Ok(Self::trusted(offsets))
    }

    /// Segments from a `cu_seqlens` tensor of shape `[n + 1]`, over a batch of `total` tokens.
    ///
    /// Reads the tensor back once, which waits for its device; prefer [`Segments::from_offsets`]
    /// where the offsets are known on the host.
    ///
    /// # Errors
    ///
    /// As [`Segments::from_offsets`], and [`SegmentsError::Unreadable`] when the read fails.
    pub fn from_tensor(cu_seqlens: Tensor<1, Int>, total: usize) -> Result<Self, SegmentsError> {
        let offsets = cu_seqlens
            .try_into_vec_as::<i64>()
            .map_err(|error| SegmentsError::Unreadable(format!("{error:?}")))?;
        Self::from_offsets(&offsets, total)
    }

    fn trusted(offsets: Vec<i32>) -> Self {
        let max_len =
            offsets.windows(2).map(|pair| (pair[1] - pair[0]) as usize).max().unwrap_or(0);
        Self(Arc::new(Boundaries {
            offsets: offsets.into(),
            max_len,
            #[cfg(feature = "cube")]
            derived: Default::default(),
        }))
    }

    /// The number of tokens.
    pub fn total(&self) -> usize {
        self.offsets()[self.len()] as usize
    }

    /// The number of segments, empty ones included.
    pub fn len(&self) -> usize {
        self.0.offsets.len() - 1
    }

    /// Whether there is no segment at all.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The longest segment, in tokens.
    pub fn max_len(&self) -> usize {
        self.0.max_len
    }

    /// The length of each segment, in tokens.
    pub fn lengths(&self) -> impl ExactSizeIterator<Item = usize> + '_ {
        self.offsets().windows(2).map(|pair| (pair[1] - pair[0]) as usize)
    }

    /// The token range of each segment.
    pub fn ranges(&self) -> impl ExactSizeIterator<Item = Range<usize>> + '_ {
        self.offsets().windows(2).map(|pair| pair[0] as usize..pair[1] as usize)
    }

    /// The `n + 1` offsets, `cu_seqlens`.
    pub fn offsets(&self) -> &[i32] {
        &self.0.offsets
    }

    /// The value of type `T` that was derived before and `fits`, or a new one, which is kept until a
    /// few others have come after it.
    #[cfg(feature = "cube")]
    pub(crate) fn derived<T: std::any::Any + Send + Sync>(
        &self,
        fits: impl Fn(&T) -> bool,
        derive: impl FnOnce() -> T,
    ) -> Arc<T> {
        let mut derived = self.0.derived.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let known = derived.iter().filter_map(|value| Arc::clone(value).downcast::<T>().ok());
        if let Some(value) = known.into_iter().find(|value| fits(value)) {
            return value;
        }
        const KEPT: usize = 8;
        let value = Arc::new(derive());
        derived.truncate(KEPT - 1);
        derived.insert(0, value.clone());
        value
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use rstest::rstest;

    #[test]
    fn lengths_and_offsets_agree() {
        let by_length = Segments::from_lengths([3, 0, 5]).unwrap();
        let by_offset = Segments::from_offsets(&[0, 3, 3, 8], 8).unwrap();
        assert_eq!(by_length, by_offset);
        assert_eq!(by_length.offsets(), [0, 3, 3, 8]);
        assert_eq!(by_length.ranges().collect::<Vec<_>>(), [0..3, 3..3, 3..8]);
        assert_eq!((by_length.total(), by_length.len(), by_length.max_len()), (8, 3, 5));
    }

    #[test]
    fn a_batch_without_segments_is_legal() {
        let none = Segments::from_offsets(&[0], 0).unwrap();
        assert!(none.is_empty());
        assert_eq!((none.total(), none.max_len()), (0, 0));
    }

    #[test]
    fn a_tensor_of_offsets_is_read() {
        let device = burn::tensor::Device::flex();
        let offsets = Tensor::<1, Int>::from_data([0, 4, 9], &device);
        let segments = Segments::from_tensor(offsets, 9).unwrap();
        assert_eq!(segments.lengths().collect::<Vec<_>>(), [4, 5]);
    }

    #[rstest]
    #[case::empty(&[], 0, "at least the offset 0")]
    #[case::late_start(&[3, 8], 8, "cu_seqlens[0] is 3")]
    #[case::decreasing(&[0, 5, 4, 8], 8, "cu_seqlens[2] is 4, below cu_seqlens[1] = 5")]
    #[case::short(&[0, 5], 8, "ends at 5 but there are 8 tokens")]
    #[case::past(&[0, 9], 8, "ends at 9 but there are 8 tokens")]
    #[case::negative(&[0, -5, 8], 8, "cu_seqlens[1] is -5")]
    #[case::negative_start(&[-1, 8], 8, "cu_seqlens[0] is -1")]
    #[case::too_long(&[0, 3_000_000_000], 3_000_000_000, "over the limit of 2147483647")]
    fn bad_offsets_are_refused(
        #[case] offsets: &[i64],
        #[case] total: usize,
        #[case] message: &str,
    ) {
        let error = Segments::from_offsets(offsets, total).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
        assert!(!error.contains('\n'));
    }

    #[test]
    fn too_many_tokens_are_refused() {
        let error = Segments::from_lengths([i32::MAX as usize, 1]).unwrap_err();
        assert_eq!(error, SegmentsError::TooLong { index: 2, value: 2_147_483_648 });
    }
}
