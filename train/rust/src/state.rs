//! What a training has learnt: parameters, optimizer, properties.

use std::ffi::c_int;
use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::ptr;

use crate::{c_path, c_text, check, ffi, refused, text, Result, StateRef, Tensor};

/// A state, which is closed when it goes. Its methods are those of [`StateRef`].
pub struct State {
    handle: *mut ffi::State,
}

// SAFETY: the library asks for one thread at a time, not for a certain one.
unsafe impl Send for State {}

impl Drop for State {
    fn drop(&mut self) {
        // SAFETY: the handle is open, and its session was closed before.
        unsafe { ffi::gradd_train_state_destroy(self.handle) }
    }
}

impl Deref for State {
    type Target = StateRef;

    fn deref(&self) -> &StateRef {
        // SAFETY: the handle is open as long as self is there.
        unsafe { &*self.handle }
    }
}

impl DerefMut for State {
    fn deref_mut(&mut self) -> &mut StateRef {
        // SAFETY: as above, and nothing else borrows it.
        unsafe { &mut *self.handle }
    }
}

impl State {
    /// An empty state.
    pub fn new() -> Result<State> {
        State::made(|out| unsafe { ffi::gradd_train_state_create(out) })
    }

    /// From a checkpoint.
    pub fn load(path: impl AsRef<Path>) -> Result<State> {
        let path = c_path(path)?;
        State::made(|out| unsafe { ffi::gradd_train_state_load(path.as_ptr(), out) })
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<State> {
        let (data, n) = (bytes.as_ptr().cast(), bytes.len());
        State::made(|out| unsafe { ffi::gradd_train_state_load_bytes(data, n, out) })
    }

    /// The state in a file, which survives a loss of power, committed every second (0) or after so
    /// many steps. A file that is not there is made of the checkpoint.
    pub fn open(
        path: impl AsRef<Path>,
        checkpoint: Option<&Path>,
        commit_every: i64,
    ) -> Result<State> {
        let path = c_path(path)?;
        let checkpoint = checkpoint.map(c_path).transpose()?;
        let options = ffi::Lasting {
            checkpoint: checkpoint.as_ref().map_or(ptr::null(), |at| at.as_ptr()),
            commit_every,
            commit_ms: 0,
        };
        State::made(|out| unsafe { ffi::gradd_train_open_state(path.as_ptr(), &options, out) })
    }

    fn made(make: impl FnOnce(*mut *mut ffi::State) -> c_int) -> Result<State> {
        let mut handle = ptr::null_mut();
        check(make(&mut handle))?;
        Ok(State { handle })
    }
}

/// A parameter as it is now.
pub struct Parameter<'a> {
    pub name: String,
    pub trainable: bool,
    /// None: it has none yet.
    pub values: Option<Tensor<'a>>,
    /// The sum since the last reset.
    pub gradient: Option<Tensor<'a>>,
    /// Steps of the optimizer that have changed it.
    pub steps: i64,
}

/// A named value that travels with the state.
#[derive(Clone, Debug, PartialEq)]
pub enum Property {
    Int(i64),
    Float(f32),
    Text(String),
}

// SAFETY of the calls below: a reference to a state is one that is open.
impl StateRef {
    /// Adds a parameter; values are copied.
    pub fn add(&mut self, name: &str, values: &Tensor, trainable: bool) -> Result<()> {
        let (name, raw) = (c_text(name)?, values.raw());
        check(unsafe {
            ffi::gradd_train_state_add(self, name.as_ptr(), &raw.kind, raw.data, trainable)
        })
    }

    pub fn write(&mut self, name: &str, values: &Tensor) -> Result<()> {
        let (i, raw) = (self.position_of(name)?, values.raw());
        check(unsafe { ffi::gradd_train_state_write(self, i, &raw.kind, raw.data) })
    }

    pub fn parameters(&self) -> Vec<Parameter<'_>> {
        let count = unsafe { ffi::gradd_train_state_count(self) };
        (0..count).map(|i| self.at(i)).collect()
    }

    pub fn parameter(&self, name: &str) -> Result<Parameter<'_>> {
        Ok(self.at(self.position_of(name)?))
    }

    fn at(&self, i: c_int) -> Parameter<'_> {
        let raw = unsafe { ffi::gradd_train_state_parameter(self, i) };
        let lent = |data: *const std::ffi::c_void| {
            let kind = raw.kind;
            // SAFETY: the state's memory, which changes by what needs &mut alone.
            (!data.is_null()).then(|| unsafe { Tensor::lent(ffi::Tensor { kind, data }) })
        };
        Parameter {
            name: text(raw.name),
            trainable: raw.trainable,
            values: lent(raw.data),
            gradient: lent(raw.gradient),
            steps: raw.steps,
        }
    }

    fn position_of(&self, name: &str) -> Result<c_int> {
        let c_name = c_text(name)?;
        match unsafe { ffi::gradd_train_state_find(self, c_name.as_ptr()) } {
            -1 => refused(format!("there is no parameter '{name}'")),
            i => Ok(i),
        }
    }

    pub fn set_property(&mut self, name: &str, value: &Property) -> Result<()> {
        let name = c_text(name)?;
        let mut words = None;
        let (kind, integer, real) = match value {
            Property::Int(n) => (0, *n, 0.0),
            Property::Float(x) => (1, 0, *x),
            Property::Text(from) => {
                words = Some(c_text(from)?);
                (2, 0, 0.0)
            }
        };
        let raw = ffi::Property {
            name: name.as_ptr(),
            kind,
            integer,
            real,
            text: words.as_ref().map_or(ptr::null(), |words| words.as_ptr()),
        };
        check(unsafe { ffi::gradd_train_state_set_property(self, &raw) })
    }

    pub fn property(&self, name: &str) -> Option<Property> {
        let name = c_text(name).ok()?;
        let i = unsafe { ffi::gradd_train_state_find_property(self, name.as_ptr()) };
        if i < 0 {
            return None;
        }
        let raw = unsafe { ffi::gradd_train_state_property(self, i) };
        Some(match raw.kind {
            0 => Property::Int(raw.integer),
            1 => Property::Float(raw.real),
            _ => Property::Text(text(raw.text)),
        })
    }

    /// Steps that the optimizer has taken.
    pub fn step(&self) -> i64 {
        unsafe { ffi::gradd_train_state_progress(self) }.step
    }

    /// In the data, as the caller counts it.
    pub fn position(&self) -> i64 {
        unsafe { ffi::gradd_train_state_progress(self) }.position
    }

    pub fn set_position(&mut self, position: i64) {
        unsafe { ffi::gradd_train_state_set_position(self, position) }
    }

    /// Of a state in a file: commits what there is.
    pub fn commit(&mut self) -> Result<()> {
        check(unsafe { ffi::gradd_train_commit(self) })
    }

    /// Writes a checkpoint.
    pub fn save(&self, path: impl AsRef<Path>, with_optimizer: bool) -> Result<()> {
        let path = c_path(path)?;
        check(unsafe { ffi::gradd_train_state_save(self, path.as_ptr(), with_optimizer) })
    }
}
