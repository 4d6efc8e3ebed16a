// What a training has learnt.
using System;
using System.Collections.Generic;

namespace Gradd.Train
{
    /// <summary>Parameters, what the optimizer knows of them, and properties. Calls wait for one
    /// another, and for the steps of its session; it is disposed of after that.</summary>
    public sealed unsafe class CheckpointState : IDisposable
    {
        private IntPtr handle;
        internal bool InSession;

        /// <summary>An empty state.</summary>
        public CheckpointState()
        {
            Native.Check(Native.gradd_train_state_create(out handle));
        }

        private CheckpointState(IntPtr handle)
        {
            this.handle = handle;
        }

        public static CheckpointState LoadCheckpoint(string path)
        {
            Native.Check(Native.gradd_train_state_load(Native.Utf8(path), out IntPtr made));
            return new CheckpointState(made);
        }

        public static CheckpointState LoadCheckpoint(byte[] bytes)
        {
            var n = (UIntPtr)bytes.Length;
            Native.Check(Native.gradd_train_state_load_bytes(bytes, n, out IntPtr made));
            return new CheckpointState(made);
        }

        /// <summary>The state in a file, which survives a loss of power, committed every second (0)
        /// or after so many steps. A file that is not there is made of the checkpoint; null: that is
        /// an error.</summary>
        public static CheckpointState Open(string path, string checkpoint, long commitEvery = 0)
        {
            IntPtr made;
            fixed (byte* from = Native.Utf8(checkpoint))
            {
                var how = new NativeLasting { Checkpoint = (IntPtr)from, CommitEvery = commitEvery };
                Native.Check(Native.gradd_train_open_state(Native.Utf8(path), &how, out made));
            }
            return new CheckpointState(made);
        }

        /// <summary>Of a state in a file: commits what there is.</summary>
        public void Commit() => Locked(() => Native.Check(Native.gradd_train_commit(Handle)));

        public void SaveCheckpoint(string path, bool saveOptimizer) => Locked(() =>
            Native.Check(Native.gradd_train_state_save(Handle, Native.Utf8(path), Byte(saveOptimizer))));

        /// <summary>Adds a parameter; values are copied.</summary>
        public void AddParameter(string name, Tensor values, bool trainable = true) => Locked(() =>
            values.With(raw => Native.Check(Native.gradd_train_state_add(
                Handle, Native.Utf8(name), &raw.Type, raw.Data, Byte(trainable)))));

        public void UpdateParameter(string name, Tensor values) => Locked(() =>
            values.With(raw => Native.Check(
                Native.gradd_train_state_write(Handle, At(name), &raw.Type, raw.Data))));

        public IList<string> ParameterNames
        {
            get
            {
                lock (this)
                {
                    var names = new List<string>();
                    for (int i = 0; i < Native.gradd_train_state_count(Handle); i++)
                    {
                        names.Add(Native.Text(Native.gradd_train_state_parameter(Handle, i).Name));
                    }
                    return names;
                }
            }
        }

        /// <summary>A copy; null = it has no values yet.</summary>
        public Tensor GetParameter(string name)
        {
            lock (this)
            {
                NativeParameter p = Native.gradd_train_state_parameter(Handle, At(name));
                return p.Data == IntPtr.Zero ? null : Tensor.Copied(p.Type, p.Data);
            }
        }

        /// <summary>A copy of the sum since the last reset; null = there is none.</summary>
        public Tensor GetGradient(string name)
        {
            lock (this)
            {
                NativeParameter p = Native.gradd_train_state_parameter(Handle, At(name));
                return p.Gradient == IntPtr.Zero ? null : Tensor.Copied(p.Type, p.Gradient);
            }
        }

        /// <summary>Steps that the optimizer has taken.</summary>
        public long Step
        {
            get { lock (this) { return Native.gradd_train_state_progress(Handle).Step; } }
        }

        /// <summary>In the data, as the caller counts it.</summary>
        public long Position
        {
            get { lock (this) { return Native.gradd_train_state_progress(Handle).Position; } }
            set { lock (this) { Native.gradd_train_state_set_position(Handle, value); } }
        }

        /// <summary>A long, a float or a string; adds it, or replaces the one of that name.</summary>
        public void AddProperty(string name, object value) => Locked(() =>
        {
            fixed (byte* named = Native.Utf8(name))
            fixed (byte* text = Native.Utf8(value as string))
            {
                var raw = new NativeProperty { Name = (IntPtr)named, Text = (IntPtr)text };
                if (value is long)
                {
                    raw.Kind = 0;
                    raw.Integer = (long)value;
                }
                else if (value is float)
                {
                    raw.Kind = 1;
                    raw.Real = (float)value;
                }
                else if (value is string)
                {
                    raw.Kind = 2;
                }
                else
                {
                    throw new ArgumentException("a property of type " + value?.GetType());
                }
                Native.Check(Native.gradd_train_state_set_property(Handle, &raw));
            }
        });

        /// <summary>A long, a float or a string; null = there is none.</summary>
        public object GetProperty(string name)
        {
            lock (this)
            {
                int i = Native.gradd_train_state_find_property(Handle, Native.Utf8(name));
                if (i < 0)
                {
                    return null;
                }
                NativeProperty raw = Native.gradd_train_state_property(Handle, i);
                return raw.Kind == 0 ? raw.Integer : raw.Kind == 1 ? raw.Real : (object)Native.Text(raw.Text);
            }
        }

        public void Dispose() => Locked(() =>
        {
            if (InSession)
            {
                throw new InvalidOperationException("the session of this state is open");
            }
            Native.gradd_train_state_destroy(handle);
            handle = IntPtr.Zero;
        });

        internal IntPtr Handle =>
            handle != IntPtr.Zero ? handle : throw new ObjectDisposedException("CheckpointState");

        internal static byte Byte(bool value) => value ? (byte)1 : (byte)0;

        internal void Locked(Action act)
        {
            lock (this)
            {
                act();
            }
        }

        private int At(string name)
        {
            int i = Native.gradd_train_state_find(Handle, Native.Utf8(name));
            return i >= 0 ? i : throw new KeyNotFoundException("there is no parameter '" + name + "'");
        }
    }
}
