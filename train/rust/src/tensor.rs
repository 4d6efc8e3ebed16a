//! Tensors: elements that are borrowed, with a type and a shape.

use std::ffi::c_int;
use std::marker::PhantomData;
use std::{ptr, slice};

use crate::{ffi, refused, Result};

/// An element type: floats and integers that Rust has.
pub trait Element: Copy + sealed::Sealed {
    /// ONNX's code.
    const DTYPE: i32;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! elements {
    ($($kind:ty = $code:literal),*) => {
        $(impl sealed::Sealed for $kind {}
        impl Element for $kind {
            const DTYPE: i32 = $code;
        })*
    };
}
elements!(
    f32 = 1,
    u8 = 2,
    i8 = 3,
    u16 = 4,
    i16 = 5,
    i32 = 6,
    i64 = 7,
    f64 = 11,
    u32 = 12,
    u64 = 13
);

const BOOL: c_int = 9;

/// Elements in row-major order, borrowed from the caller or from the library.
#[derive(Clone, Copy)]
pub struct Tensor<'a> {
    raw: ffi::Tensor,
    from: PhantomData<&'a [u8]>,
}

impl ffi::Tensor {
    pub(crate) const NONE: ffi::Tensor = ffi::Tensor {
        kind: ffi::Type {
            dtype: 0,
            rank: 0,
            dims: [0; ffi::MAX_RANK],
        },
        data: ptr::null(),
    };
}

impl<'a> Tensor<'a> {
    /// Fails if there are not as many values as the sizes say.
    pub fn new<T: Element>(values: &'a [T], dims: &[i64]) -> Result<Tensor<'a>> {
        Tensor::of(T::DTYPE, values.as_ptr().cast(), values.len(), dims)
    }

    pub fn bools(values: &'a [bool], dims: &[i64]) -> Result<Tensor<'a>> {
        Tensor::of(BOOL, values.as_ptr().cast(), values.len(), dims)
    }

    fn of(dtype: c_int, data: *const u8, len: usize, dims: &[i64]) -> Result<Tensor<'a>> {
        let count = dims
            .iter()
            .try_fold(1usize, |n, &d| n.checked_mul(usize::try_from(d).ok()?));
        if dims.len() > ffi::MAX_RANK || count != Some(len) {
            return refused(format!("{len} elements for the shape {dims:?}"));
        }
        let mut raw = ffi::Tensor {
            data: data.cast(),
            ..ffi::Tensor::NONE
        };
        raw.kind.dtype = dtype;
        raw.kind.rank = dims.len() as c_int;
        raw.kind.dims[..dims.len()].copy_from_slice(dims);
        Ok(Tensor {
            raw,
            from: PhantomData,
        })
    }

    /// # Safety
    /// The memory is valid for 'a, and has elements of the type that the tensor says.
    pub(crate) unsafe fn lent(raw: ffi::Tensor) -> Tensor<'a> {
        Tensor {
            raw,
            from: PhantomData,
        }
    }

    pub(crate) fn raw(&self) -> ffi::Tensor {
        self.raw
    }

    pub fn dims(&self) -> &[i64] {
        &self.raw.kind.dims[..self.raw.kind.rank.max(0) as usize]
    }

    /// ONNX's code.
    pub fn dtype(&self) -> i32 {
        self.raw.kind.dtype
    }

    /// Where they are. Fails for another element type.
    pub fn elements<T: Element>(&self) -> Result<&'a [T]> {
        if self.raw.kind.dtype != T::DTYPE {
            let (wanted, got) = (T::DTYPE, self.raw.kind.dtype);
            return refused(format!("elements of type {wanted} of a tensor of {got}"));
        }
        let count = self.dims().iter().product::<i64>() as usize;
        if count == 0 {
            return Ok(&[]);
        }
        // SAFETY: so many elements of this type are there, by the constructors; any bits are a
        // value of an Element, and what the library lends is aligned.
        Ok(unsafe { slice::from_raw_parts(self.raw.data.cast(), count) })
    }

    /// A copy.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        Ok(self.elements()?.to_vec())
    }
}
