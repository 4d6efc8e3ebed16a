//! Trains ONNX models where the data are: `libgradd_train` for Rust.
//!
//! ```no_run
//! use gradd_train::{Model, Optimizer, Options, Session, State, Tensor};
//!
//! fn main() -> Result<(), gradd_train::Error> {
//!     let (pixels, labels) = (vec![0f32; 32 * 784], vec![0i64; 32]);
//!     let mut options = Options::new(Model::path("training_model.onnx"));
//!     options.optimizer = Some(Optimizer::adamw());
//!     let mut session = Session::open(State::load("checkpoint")?, &options)?;
//!     let inputs = [Tensor::new(&pixels, &[32, 784])?, Tensor::new(&labels, &[32])?];
//!     for _ in 0..10 {
//!         session.lazy_reset_grad();
//!         println!("{}", session.step(&inputs)?[0].to_vec::<f32>()?[0]);
//!         session.optimizer_step()?;
//!     }
//!     session.state().save("checkpoint", true)
//! }
//! ```
//!
//! Everything else is as `train/gradd_train.h` says. What fails gives an [`Error`]; memory that the
//! library lends is borrowed, so that the compiler sees how long it is valid.

mod ffi;
mod state;
mod tensor;

use std::ffi::{c_char, c_int, CStr, CString};
use std::fmt;
use std::path::Path;
use std::ptr;
use std::sync::atomic::AtomicI32;

pub use ffi::{Optimizer, State as StateRef};
pub use state::{Parameter, Property, State};
pub use tensor::{Element, Tensor};

/// The name of the library's status ("TENSOR", "IO"), and its sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    pub status: String,
    pub message: String,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.status, self.message)
    }
}

impl std::error::Error for Error {}

pub type Result<T> = std::result::Result<T, Error>;

fn refused<T>(message: String) -> Result<T> {
    let status = "TENSOR".to_string();
    Err(Error { status, message })
}

fn check(status: c_int) -> Result<()> {
    if status == 0 {
        return Ok(());
    }
    // SAFETY: both are texts of the library, the second valid until this thread's next failure.
    let (name, sentence) = unsafe { (ffi::gradd_status_name(status), ffi::gradd_error_message()) };
    Err(Error {
        status: text(name),
        message: text(sentence),
    })
}

fn text(from: *const c_char) -> String {
    // SAFETY: called with texts of the library alone, which end with a zero.
    unsafe { CStr::from_ptr(from) }
        .to_string_lossy()
        .into_owned()
}

fn c_text(from: impl AsRef<[u8]>) -> Result<CString> {
    CString::new(from.as_ref()).or_else(|e| refused(format!("a zero inside a text: {e}")))
}

fn c_path(path: impl AsRef<Path>) -> Result<CString> {
    c_text(path.as_ref().as_os_str().as_encoded_bytes())
}

pub fn version() -> String {
    // SAFETY: a constant of the library.
    text(unsafe { ffi::gradd_version() })
}

#[doc(hidden)]
pub fn sizes() -> [usize; 9] {
    ffi::sizes()
}

/// An ONNX model.
pub enum Model<'a> {
    Path(&'a Path),
    Bytes(&'a [u8]),
}

impl<'a> Model<'a> {
    pub fn path(path: &'a (impl AsRef<Path> + ?Sized)) -> Self {
        Model::Path(path.as_ref())
    }
}

/// A model as C takes it, with the text that it points to.
struct CModel(ffi::Model, #[allow(dead_code)] Option<CString>);

impl CModel {
    fn new(model: Option<&Model>) -> Result<CModel> {
        let mut made = ffi::Model {
            bytes: ptr::null(),
            n: 0,
            path: ptr::null(),
        };
        let mut path = None;
        match model {
            Some(Model::Path(at)) => {
                let at = path.insert(c_path(at)?);
                made.path = at.as_ptr();
            }
            Some(Model::Bytes(bytes)) => {
                made.bytes = bytes.as_ptr().cast();
                made.n = bytes.len();
            }
            None => {}
        }
        Ok(CModel(made, path))
    }
}

impl Optimizer {
    /// torch's AdamW: 0.9, 0.999, 1e-8, weight decay 0.01, bias correction.
    pub fn adamw() -> Optimizer {
        // SAFETY: takes nothing.
        unsafe { ffi::gradd_train_adamw() }
    }

    /// Without momentum and weight decay.
    pub fn sgd() -> Optimizer {
        // SAFETY: takes nothing.
        unsafe { ffi::gradd_train_sgd() }
    }

    /// Kind and constants of an optimizer model, as ONNX Runtime writes them.
    pub fn load(model: &Model) -> Result<Optimizer> {
        let model = CModel::new(Some(model))?;
        let mut loaded = Optimizer::default();
        // SAFETY: the model lives until the end of the function.
        check(unsafe { ffi::gradd_train_optimizer_load(&model.0, &mut loaded) })?;
        Ok(loaded)
    }
}

/// What a session is made of.
pub struct Options<'a> {
    pub training: Model<'a>,
    /// Without it eval steps and export fail.
    pub eval: Option<Model<'a>>,
    /// Without it steps of the optimizer fail.
    pub optimizer: Option<Optimizer>,
    /// 0 = as many as the process may use.
    pub threads: i32,
    /// Shapes of inputs whose plans are kept; 0 = the default.
    pub max_plans: i32,
    /// Most bytes of activations and workspace in a step; 0 = what it takes.
    pub memory_budget: i64,
    /// Of the random numbers of a new state.
    pub seed: u64,
}

impl<'a> Options<'a> {
    pub fn new(training: Model<'a>) -> Self {
        Options {
            training,
            eval: None,
            optimizer: None,
            threads: 0,
            max_plans: 0,
            memory_budget: 0,
            seed: 0,
        }
    }
}

/// One of a session's two models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Training,
    Eval,
}

/// Trains a state, which it owns until [`Session::close`] gives it back.
pub struct Session {
    handle: *mut ffi::Session,
    state: Option<State>,
}

// SAFETY: the library asks for one thread at a time, not for a certain one.
unsafe impl Send for Session {}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: the handle is open, or null; the state goes after it.
        unsafe { ffi::gradd_train_close(self.handle) }
    }
}

impl Session {
    pub fn open(mut state: State, options: &Options) -> Result<Session> {
        let training = CModel::new(Some(&options.training))?;
        let eval = CModel::new(options.eval.as_ref())?;
        let raw = ffi::Options {
            training: training.0,
            eval: eval.0,
            optimizer: options.optimizer.unwrap_or_default(),
            threads: options.threads,
            max_plans: options.max_plans,
            memory_budget: options.memory_budget,
            seed: options.seed,
        };
        let mut handle = ptr::null_mut();
        // SAFETY: what the options point to lives until the end of the function.
        check(unsafe { ffi::gradd_train_open(&mut *state, &raw, &mut handle) })?;
        Ok(Session {
            handle,
            state: Some(state),
        })
    }

    /// Gradients go with it.
    pub fn close(mut self) -> Option<State> {
        let state = self.state.take();
        // SAFETY: the handle is open; drop then finds null.
        unsafe { ffi::gradd_train_close(self.handle) }
        self.handle = ptr::null_mut();
        state
    }

    pub fn state(&self) -> &StateRef {
        // SAFETY: the state lives as long as its session.
        unsafe { &*ffi::gradd_train_session_state(self.handle) }
    }

    pub fn state_mut(&mut self) -> &mut StateRef {
        // SAFETY: the state lives as long as its session, and nothing else borrows it.
        unsafe { &mut *ffi::gradd_train_session_state(self.handle) }
    }

    /// Forward and backward, which adds to the gradients. Outputs are valid until the next step.
    pub fn step(&mut self, inputs: &[Tensor]) -> Result<Vec<Tensor<'_>>> {
        self.run(Phase::Training, inputs, None)
    }

    /// A forward of the eval model, which changes nothing.
    pub fn eval_step(&mut self, inputs: &[Tensor]) -> Result<Vec<Tensor<'_>>> {
        self.run(Phase::Eval, inputs, None)
    }

    /// A step of either kind, which ends with STALE when `cancel` is no longer 0.
    pub fn run(
        &mut self,
        phase: Phase,
        inputs: &[Tensor],
        cancel: Option<&AtomicI32>,
    ) -> Result<Vec<Tensor<'_>>> {
        let raw: Vec<ffi::Tensor> = inputs.iter().map(Tensor::raw).collect();
        let count = self.output_names(phase).len();
        let mut outputs = vec![ffi::Tensor::NONE; count];
        let flag = cancel.map_or(ptr::null(), |flag| flag.as_ptr().cast_const());
        let step = match phase {
            Phase::Training => ffi::gradd_train_step,
            Phase::Eval => ffi::gradd_train_eval_step,
        };
        let n = raw.len() as c_int;
        // SAFETY: there is room for every output of the model.
        check(unsafe { step(self.handle, raw.as_ptr(), n, outputs.as_mut_ptr(), flag) })?;
        // SAFETY: the session's memory, which its next step can change: that needs &mut self.
        Ok(outputs
            .into_iter()
            .map(|raw| unsafe { Tensor::lent(raw) })
            .collect())
    }

    /// The next step's gradients replace those there are.
    pub fn lazy_reset_grad(&mut self) {
        // SAFETY: as in all calls below, the handle is open.
        unsafe { ffi::gradd_train_lazy_reset_grad(self.handle) }
    }

    /// The norm of all gradients before clipping, 0 if they are not clipped.
    pub fn optimizer_step(&mut self) -> Result<f64> {
        let mut norm = 0.0;
        check(unsafe { ffi::gradd_train_optimizer_step(self.handle, &mut norm) })?;
        Ok(norm)
    }

    pub fn learning_rate(&self) -> f32 {
        unsafe { ffi::gradd_train_learning_rate(self.handle) }
    }

    pub fn set_learning_rate(&mut self, rate: f32) -> Result<()> {
        check(unsafe { ffi::gradd_train_set_learning_rate(self.handle, rate) })
    }

    /// From 0 to the initial rate in the steps of the warm-up, then to 0 in the last one.
    pub fn set_linear_schedule(&mut self, warmup: i64, total: i64, initial: f32) -> Result<()> {
        check(unsafe { ffi::gradd_train_set_linear_schedule(self.handle, warmup, total, initial) })
    }

    pub fn schedule_step(&mut self) -> Result<()> {
        check(unsafe { ffi::gradd_train_schedule_step(self.handle) })
    }

    /// Starts the random numbers of the steps that follow again.
    pub fn set_seed(&mut self, seed: u64) {
        unsafe { ffi::gradd_train_set_seed(self.handle, seed) }
    }

    /// No longer trains the parameters that match, "*" for any characters: so many were trained.
    pub fn freeze(&mut self, pattern: &str) -> Result<i32> {
        let (pattern, mut changed) = (c_text(pattern)?, 0);
        check(unsafe { ffi::gradd_train_freeze(self.handle, pattern.as_ptr(), &mut changed) })?;
        Ok(changed)
    }

    /// Trains the parameters that match: so many were frozen.
    pub fn thaw(&mut self, pattern: &str) -> Result<i32> {
        let (pattern, mut changed) = (c_text(pattern)?, 0);
        check(unsafe { ffi::gradd_train_thaw(self.handle, pattern.as_ptr(), &mut changed) })?;
        Ok(changed)
    }

    /// The values of all parameters, or of the trainable ones, one after the other.
    pub fn parameters(&self, trainable_only: bool) -> Result<Vec<f32>> {
        let mut count = 0;
        check(unsafe {
            ffi::gradd_train_contiguous_count(self.handle, trainable_only, &mut count)
        })?;
        let mut values = vec![0f32; count as usize];
        let to = values.as_mut_ptr();
        check(unsafe { ffi::gradd_train_copy_out(self.handle, trainable_only, to, count) })?;
        Ok(values)
    }

    pub fn set_parameters(&mut self, values: &[f32], trainable_only: bool) -> Result<()> {
        let (from, count) = (values.as_ptr(), values.len() as i64);
        check(unsafe { ffi::gradd_train_copy_in(self.handle, trainable_only, from, count) })
    }

    pub fn input_names(&self, phase: Phase) -> Vec<String> {
        let phase = phase as c_int;
        let count = unsafe { ffi::gradd_train_input_count(self.handle, phase) };
        (0..count)
            .map(|i| text(unsafe { ffi::gradd_train_input_name(self.handle, phase, i) }))
            .collect()
    }

    pub fn output_names(&self, phase: Phase) -> Vec<String> {
        let phase = phase as c_int;
        let count = unsafe { ffi::gradd_train_output_count(self.handle, phase) };
        (0..count)
            .map(|i| text(unsafe { ffi::gradd_train_output_name(self.handle, phase, i) }))
            .collect()
    }

    /// Writes what these outputs of the eval model need, with the parameters inside.
    pub fn export(&self, path: impl AsRef<Path>, outputs: &[&str]) -> Result<()> {
        let path = c_path(path)?;
        let names = outputs.iter().map(c_text).collect::<Result<Vec<_>>>()?;
        let texts: Vec<*const c_char> = names.iter().map(|name| name.as_ptr()).collect();
        let n = texts.len() as c_int;
        check(unsafe { ffi::gradd_train_export(self.handle, path.as_ptr(), texts.as_ptr(), n) })
    }
}
