// A session: a state, its models and its optimizer.
using System;
using System.Collections.Generic;
using System.Runtime.InteropServices;
using System.Threading;

namespace Gradd.Train
{
    /// <summary>What a session is made of.</summary>
    public sealed class SessionOptions
    {
        /// <summary>Paths; the first is required. Without an eval model eval steps and export fail,
        /// without an optimizer its steps do.</summary>
        public string Training, Eval;
        public Optimizer Optimizer;

        /// <summary>0 = as many threads as the process may use; the default number of plans; what a
        /// step takes.</summary>
        public int Threads, MaxPlans;
        public long MemoryBudget;

        /// <summary>Of the random numbers of a new state.</summary>
        public ulong Seed;
    }

    /// <summary>Trains a state with a model, in process. Methods have the names of ONNX Runtime's
    /// TrainingSession. What steps give is a copy.</summary>
    public sealed unsafe class TrainingSession : IDisposable
    {
        private readonly IntPtr cancel = Marshal.AllocHGlobal(sizeof(int));
        private IntPtr handle;

        /// <summary>The state outlives the session.</summary>
        public TrainingSession(CheckpointState state, SessionOptions options)
        {
            State = state;
            SetTerminate(false);
            fixed (byte* training = Native.Utf8(options.Training))
            fixed (byte* eval = Native.Utf8(options.Eval))
            {
                var raw = new NativeOptions
                {
                    Training = new NativeModel { Path = (IntPtr)training },
                    Eval = new NativeModel { Path = (IntPtr)eval },
                    Optimizer = options.Optimizer == null ? default(NativeOptimizer) : options.Optimizer.Native,
                    Threads = options.Threads,
                    MaxPlans = options.MaxPlans,
                    MemoryBudget = options.MemoryBudget,
                    Seed = options.Seed,
                };
                lock (state)
                {
                    Native.Check(Native.gradd_train_open(state.Handle, &raw, out handle));
                    state.InSession = true;
                }
            }
        }

        /// <summary>Of the files of generate_artifacts; eval and optimizer may be null.</summary>
        public TrainingSession(CheckpointState state, string training, string eval, string optimizer)
            : this(state, new SessionOptions
            {
                Training = training,
                Eval = eval,
                Optimizer = optimizer == null ? null : Optimizer.Load(optimizer),
            })
        {
        }

        ~TrainingSession()
        {
            Marshal.FreeHGlobal(cancel);
        }

        /// <summary>Parameters and gradients by name, properties, files.</summary>
        public CheckpointState State { get; }

        /// <summary>Forward and backward, which adds to the gradients. Inputs in the model's order.
        /// </summary>
        public Tensor[] TrainStep(params Tensor[] inputs) => Step(0, inputs);

        /// <summary>A forward of the eval model, which changes nothing.</summary>
        public Tensor[] EvalStep(params Tensor[] inputs) => Step(1, inputs);

        /// <summary>From any thread: the step that runs ends, and others fail, with STALE, until it
        /// is false.</summary>
        public void SetTerminate(bool value)
        {
            Volatile.Write(ref *(int*)cancel, value ? 1 : 0);
            GC.KeepAlive(this);
        }

        /// <summary>The next step's gradients replace those there are.</summary>
        public void LazyResetGrad() => State.Locked(() => Native.gradd_train_lazy_reset_grad(Handle));

        /// <summary>The norm of all gradients before clipping, 0 if they are not clipped.</summary>
        public double OptimizerStep()
        {
            lock (State)
            {
                Native.Check(Native.gradd_train_optimizer_step(Handle, out double norm));
                return norm;
            }
        }

        public void SetLearningRate(float rate) => State.Locked(() =>
            Native.Check(Native.gradd_train_set_learning_rate(Handle, rate)));

        public float GetLearningRate()
        {
            lock (State)
            {
                return Native.gradd_train_learning_rate(Handle);
            }
        }

        /// <summary>From 0 to the initial rate in the steps of the warm-up, then to 0 in the last
        /// one.</summary>
        public void RegisterLinearLRScheduler(long warmup, long total, float initial) => State.Locked(() =>
            Native.Check(Native.gradd_train_set_linear_schedule(Handle, warmup, total, initial)));

        public void SchedulerStep() => State.Locked(() =>
            Native.Check(Native.gradd_train_schedule_step(Handle)));

        /// <summary>Starts the random numbers of the steps that follow again.</summary>
        public void SetSeed(ulong seed) => State.Locked(() => Native.gradd_train_set_seed(Handle, seed));

        /// <summary>No longer trains the parameters that match, "*" for any characters: so many were
        /// trained.</summary>
        public int Freeze(string pattern)
        {
            lock (State)
            {
                Native.Check(Native.gradd_train_freeze(Handle, Native.Utf8(pattern), out int changed));
                return changed;
            }
        }

        /// <summary>Trains the parameters that match: so many were frozen.</summary>
        public int Thaw(string pattern)
        {
            lock (State)
            {
                Native.Check(Native.gradd_train_thaw(Handle, Native.Utf8(pattern), out int changed));
                return changed;
            }
        }

        /// <summary>The values of all parameters, or of the trainable ones, one after the other.
        /// </summary>
        public float[] ToBuffer(bool onlyTrainable)
        {
            byte only = CheckpointState.Byte(onlyTrainable);
            lock (State)
            {
                Native.Check(Native.gradd_train_contiguous_count(Handle, only, out long count));
                var values = new float[count];
                Native.Check(Native.gradd_train_copy_out(Handle, only, values, count));
                return values;
            }
        }

        public void FromBuffer(float[] values, bool onlyTrainable) => State.Locked(() =>
            Native.Check(Native.gradd_train_copy_in(
                Handle, CheckpointState.Byte(onlyTrainable), values, values.Length)));

        public IList<string> InputNames(bool training)
        {
            int phase = training ? 0 : 1;
            lock (State)
            {
                var names = new List<string>();
                for (int i = 0; i < Native.gradd_train_input_count(Handle, phase); i++)
                {
                    names.Add(Native.Text(Native.gradd_train_input_name(Handle, phase, i)));
                }
                return names;
            }
        }

        public IList<string> OutputNames(bool training)
        {
            int phase = training ? 0 : 1;
            lock (State)
            {
                var names = new List<string>();
                for (int i = 0; i < Native.gradd_train_output_count(Handle, phase); i++)
                {
                    names.Add(Native.Text(Native.gradd_train_output_name(Handle, phase, i)));
                }
                return names;
            }
        }

        /// <summary>Writes what these outputs of the eval model need, with the parameters inside.
        /// </summary>
        public void ExportModelForInferencing(string path, params string[] outputs)
        {
            var texts = new byte[outputs.Length][];
            for (int i = 0; i < outputs.Length; i++)
            {
                texts[i] = Native.Utf8(outputs[i]);
            }
            GCHandle[] pins = Array.ConvertAll(texts, text => GCHandle.Alloc(text, GCHandleType.Pinned));
            IntPtr[] names = Array.ConvertAll(pins, pin => pin.AddrOfPinnedObject());
            try
            {
                fixed (IntPtr* first = names)
                {
                    lock (State)
                    {
                        Native.Check(Native.gradd_train_export(Handle, Native.Utf8(path), first, names.Length));
                    }
                }
            }
            finally
            {
                Array.ForEach(pins, pin => pin.Free());
            }
        }

        /// <summary>Gradients go with it.</summary>
        public void Dispose() => State.Locked(() =>
        {
            if (handle != IntPtr.Zero)
            {
                Native.gradd_train_close(handle);
                State.InSession = false;
            }
            handle = IntPtr.Zero;
        });

        private IntPtr Handle =>
            handle != IntPtr.Zero ? handle : throw new ObjectDisposedException("TrainingSession");

        private Tensor[] Step(int phase, Tensor[] inputs)
        {
            lock (State)
            {
                var raw = new NativeTensor[inputs.Length + 1];
                var outputs = new NativeTensor[Native.gradd_train_output_count(Handle, phase) + 1];
                var pins = new GCHandle[inputs.Length];
                try
                {
                    for (int i = 0; i < inputs.Length; i++)
                    {
                        pins[i] = inputs[i].Pin(out raw[i]);
                    }
                    fixed (NativeTensor* from = raw, to = outputs)
                    {
                        int n = inputs.Length;
                        Native.Check(phase == 0
                            ? Native.gradd_train_step(Handle, from, n, to, cancel)
                            : Native.gradd_train_eval_step(Handle, from, n, to, cancel));
                    }
                }
                finally
                {
                    Array.ForEach(pins, pin => { if (pin.IsAllocated) { pin.Free(); } });
                }
                GC.KeepAlive(this); // cancel is there as long
                var given = new Tensor[outputs.Length - 1];
                for (int i = 0; i < given.Length; i++)
                {
                    given[i] = Tensor.Copied(outputs[i].Type, outputs[i].Data);
                }
                return given;
            }
        }
    }
}
