//! What of train/gradd_train.h the crate uses, as C has it.

use std::ffi::{c_char, c_int, c_void};
use std::marker::PhantomData;
use std::mem::size_of;

pub const MAX_RANK: usize = 8;

/// A state that something else owns. It has no size: to swap two of them changes nothing.
#[repr(C)]
pub struct State {
    _private: [u8; 0],
    _one_thread: PhantomData<*mut u8>,
}

#[repr(C)]
pub struct Session {
    _private: [u8; 0],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Type {
    pub dtype: c_int,
    pub rank: c_int,
    pub dims: [i64; MAX_RANK],
}

#[repr(C)]
pub struct Parameter {
    pub name: *const c_char,
    pub kind: Type,
    pub data: *mut c_void,
    pub trainable: bool,
    pub gradient: *const c_void,
    pub moments: [*mut f32; 2],
    pub steps: i64,
}

#[repr(C)]
pub struct Progress {
    pub step: i64,
    pub learning_rate: f32,
    pub initial_learning_rate: f32,
    pub position: i64,
}

#[repr(C)]
pub struct Property {
    pub name: *const c_char,
    pub kind: c_int,
    pub integer: i64,
    pub real: f32,
    pub text: *const c_char,
}

#[repr(C)]
pub struct Lasting {
    pub checkpoint: *const c_char,
    pub commit_every: i64,
    pub commit_ms: i64,
}

#[repr(C)]
pub struct Model {
    pub bytes: *const c_void,
    pub n: usize,
    pub path: *const c_char,
}

/// An optimizer and its constants.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Optimizer {
    /// 0 = none, 1 = AdamW, 2 = SGD.
    pub kind: c_int,
    /// Of AdamW: 0 = L2, 1 = as transformers has it, 2 = torch's.
    pub mode: c_int,
    pub bias_correction: bool,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    /// Of SGD.
    pub momentum: f64,
    pub weight_decay: f64,
    /// Clips the norm of all gradients together; 0 = not clipped.
    pub max_norm: f64,
}

#[repr(C)]
pub struct Options {
    pub training: Model,
    pub eval: Model,
    pub optimizer: Optimizer,
    pub threads: c_int,
    pub max_plans: c_int,
    pub memory_budget: i64,
    pub seed: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Tensor {
    pub kind: Type,
    pub data: *const c_void,
}

/// Sizes of the structures above, for a comparison with those of C.
pub fn sizes() -> [usize; 9] {
    [
        size_of::<Type>(),
        size_of::<Parameter>(),
        size_of::<Progress>(),
        size_of::<Property>(),
        size_of::<Lasting>(),
        size_of::<Model>(),
        size_of::<Optimizer>(),
        size_of::<Options>(),
        size_of::<Tensor>(),
    ]
}

#[rustfmt::skip] // one line for each function
extern "C" {
    pub fn gradd_version() -> *const c_char;
    pub fn gradd_status_name(status: c_int) -> *const c_char;
    pub fn gradd_error_message() -> *const c_char;

    pub fn gradd_train_state_create(out: *mut *mut State) -> c_int;
    pub fn gradd_train_state_load(path: *const c_char, out: *mut *mut State) -> c_int;
    pub fn gradd_train_state_load_bytes(bytes: *const c_void, n: usize, out: *mut *mut State) -> c_int;
    pub fn gradd_train_open_state(path: *const c_char, options: *const Lasting, out: *mut *mut State) -> c_int;
    pub fn gradd_train_commit(state: *mut State) -> c_int;
    pub fn gradd_train_state_save(state: *const State, path: *const c_char, with_optimizer: bool) -> c_int;
    pub fn gradd_train_state_destroy(state: *mut State);
    pub fn gradd_train_state_add(state: *mut State, name: *const c_char, kind: *const Type, data: *const c_void, trainable: bool) -> c_int;
    pub fn gradd_train_state_write(state: *mut State, i: c_int, kind: *const Type, data: *const c_void) -> c_int;
    pub fn gradd_train_state_count(state: *const State) -> c_int;
    pub fn gradd_train_state_find(state: *const State, name: *const c_char) -> c_int;
    pub fn gradd_train_state_parameter(state: *const State, i: c_int) -> Parameter;
    pub fn gradd_train_state_progress(state: *const State) -> Progress;
    pub fn gradd_train_state_set_position(state: *mut State, position: i64);
    pub fn gradd_train_state_set_property(state: *mut State, property: *const Property) -> c_int;
    pub fn gradd_train_state_find_property(state: *const State, name: *const c_char) -> c_int;
    pub fn gradd_train_state_property(state: *const State, i: c_int) -> Property;

    pub fn gradd_train_adamw() -> Optimizer;
    pub fn gradd_train_sgd() -> Optimizer;
    pub fn gradd_train_optimizer_load(model: *const Model, out: *mut Optimizer) -> c_int;
    pub fn gradd_train_open(state: *mut State, options: *const Options, out: *mut *mut Session) -> c_int;
    pub fn gradd_train_close(session: *mut Session);
    pub fn gradd_train_session_state(session: *const Session) -> *mut State;
    pub fn gradd_train_input_count(session: *const Session, phase: c_int) -> c_int;
    pub fn gradd_train_output_count(session: *const Session, phase: c_int) -> c_int;
    pub fn gradd_train_input_name(session: *const Session, phase: c_int, i: c_int) -> *const c_char;
    pub fn gradd_train_output_name(session: *const Session, phase: c_int, i: c_int) -> *const c_char;
    pub fn gradd_train_step(session: *mut Session, inputs: *const Tensor, n: c_int, outputs: *mut Tensor, cancel: *const c_int) -> c_int;
    pub fn gradd_train_eval_step(session: *mut Session, inputs: *const Tensor, n: c_int, outputs: *mut Tensor, cancel: *const c_int) -> c_int;
    pub fn gradd_train_lazy_reset_grad(session: *mut Session);
    pub fn gradd_train_optimizer_step(session: *mut Session, out_norm: *mut f64) -> c_int;
    pub fn gradd_train_learning_rate(session: *const Session) -> f32;
    pub fn gradd_train_set_learning_rate(session: *mut Session, rate: f32) -> c_int;
    pub fn gradd_train_set_linear_schedule(session: *mut Session, warmup: i64, total: i64, initial: f32) -> c_int;
    pub fn gradd_train_schedule_step(session: *mut Session) -> c_int;
    pub fn gradd_train_set_seed(session: *mut Session, seed: u64);
    pub fn gradd_train_freeze(session: *mut Session, pattern: *const c_char, out: *mut c_int) -> c_int;
    pub fn gradd_train_thaw(session: *mut Session, pattern: *const c_char, out: *mut c_int) -> c_int;
    pub fn gradd_train_contiguous_count(session: *const Session, trainable_only: bool, out: *mut i64) -> c_int;
    pub fn gradd_train_copy_out(session: *const Session, trainable_only: bool, buffer: *mut f32, count: i64) -> c_int;
    pub fn gradd_train_copy_in(session: *mut Session, trainable_only: bool, buffer: *const f32, count: i64) -> c_int;
    pub fn gradd_train_export(session: *const Session, path: *const c_char, outputs: *const *const c_char, n: c_int) -> c_int;
}
