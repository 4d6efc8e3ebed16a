// What of train/gradd_train.h the classes use, as C has it. Texts are UTF-8 with a zero at the end.
using System;
using System.Runtime.InteropServices;
using System.Text;

namespace Gradd.Train
{
    [StructLayout(LayoutKind.Sequential)]
    internal unsafe struct NativeType
    {
        public const int MaxRank = 8;
        public int DType;
        public int Rank;
        public fixed long Dims[MaxRank];
    }

    [StructLayout(LayoutKind.Sequential)]
    internal unsafe struct NativeParameter
    {
        public IntPtr Name;
        public NativeType Type;
        public IntPtr Data;
        public byte Trainable;
        public IntPtr Gradient;
        public IntPtr Moment1;
        public IntPtr Moment2;
        public long Steps;
    }

    [StructLayout(LayoutKind.Sequential)]
    internal struct NativeProgress
    {
        public long Step;
        public float LearningRate;
        public float InitialLearningRate;
        public long Position;
    }

    [StructLayout(LayoutKind.Sequential)]
    internal struct NativeProperty
    {
        public IntPtr Name;
        public int Kind;
        public long Integer;
        public float Real;
        public IntPtr Text;
    }

    [StructLayout(LayoutKind.Sequential)]
    internal struct NativeLasting
    {
        public IntPtr Checkpoint;
        public long CommitEvery;
        public long CommitMs;
    }

    [StructLayout(LayoutKind.Sequential)]
    internal struct NativeModel
    {
        public IntPtr Bytes;
        public UIntPtr N;
        public IntPtr Path;
    }

    [StructLayout(LayoutKind.Sequential)]
    internal struct NativeOptimizer
    {
        public int Kind;
        public int Mode;
        public byte BiasCorrection;
        public double Beta1;
        public double Beta2;
        public double Eps;
        public double Momentum;
        public double WeightDecay;
        public double MaxNorm;
    }

    [StructLayout(LayoutKind.Sequential)]
    internal struct NativeOptions
    {
        public NativeModel Training;
        public NativeModel Eval;
        public NativeOptimizer Optimizer;
        public int Threads;
        public int MaxPlans;
        public long MemoryBudget;
        public ulong Seed;
    }

    [StructLayout(LayoutKind.Sequential)]
    internal struct NativeTensor
    {
        public NativeType Type;
        public IntPtr Data;
    }

    /// <summary>Sizes of these structures, for a comparison with those of C.</summary>
    public static unsafe class Sizes
    {
        public static int[] Of() => new[]
        {
            sizeof(NativeType), sizeof(NativeParameter), sizeof(NativeProgress),
            sizeof(NativeProperty), sizeof(NativeLasting), sizeof(NativeModel),
            sizeof(NativeOptimizer), sizeof(NativeOptions), sizeof(NativeTensor),
        };
    }

    internal static unsafe class Native
    {
        private const string Lib = "gradd_train";

        internal static byte[] Utf8(string text)
        {
            if (text == null)
            {
                return null;
            }
            if (text.IndexOf('\0') >= 0)
            {
                throw new ArgumentException("a zero inside the text '" + text + "'");
            }
            return Encoding.UTF8.GetBytes(text + "\0");
        }

        internal static string Text(IntPtr utf8)
        {
            int n = 0;
            while (Marshal.ReadByte(utf8, n) != 0)
            {
                n++;
            }
            var bytes = new byte[n];
            Marshal.Copy(utf8, bytes, 0, n);
            return Encoding.UTF8.GetString(bytes);
        }

        internal static void Check(int status)
        {
            if (status != 0)
            {
                throw new TrainException(Text(gradd_status_name(status)), Text(gradd_error_message()));
            }
        }

        [DllImport(Lib)] internal static extern IntPtr gradd_version();
        [DllImport(Lib)] internal static extern IntPtr gradd_status_name(int status);
        [DllImport(Lib)] internal static extern IntPtr gradd_error_message();

        [DllImport(Lib)] internal static extern int gradd_train_state_create(out IntPtr state);
        [DllImport(Lib)] internal static extern int gradd_train_state_load(byte[] path, out IntPtr state);
        [DllImport(Lib)] internal static extern int gradd_train_state_load_bytes(byte[] bytes, UIntPtr n, out IntPtr state);
        [DllImport(Lib)] internal static extern int gradd_train_open_state(byte[] path, NativeLasting* options, out IntPtr state);
        [DllImport(Lib)] internal static extern int gradd_train_commit(IntPtr state);
        [DllImport(Lib)] internal static extern int gradd_train_state_save(IntPtr state, byte[] path, byte withOptimizer);
        [DllImport(Lib)] internal static extern void gradd_train_state_destroy(IntPtr state);
        [DllImport(Lib)] internal static extern int gradd_train_state_add(IntPtr state, byte[] name, NativeType* type, IntPtr data, byte trainable);
        [DllImport(Lib)] internal static extern int gradd_train_state_write(IntPtr state, int i, NativeType* type, IntPtr data);
        [DllImport(Lib)] internal static extern int gradd_train_state_count(IntPtr state);
        [DllImport(Lib)] internal static extern int gradd_train_state_find(IntPtr state, byte[] name);
        [DllImport(Lib)] internal static extern NativeParameter gradd_train_state_parameter(IntPtr state, int i);
        [DllImport(Lib)] internal static extern NativeProgress gradd_train_state_progress(IntPtr state);
        [DllImport(Lib)] internal static extern void gradd_train_state_set_position(IntPtr state, long position);
        [DllImport(Lib)] internal static extern int gradd_train_state_set_property(IntPtr state, NativeProperty* property);
        [DllImport(Lib)] internal static extern int gradd_train_state_find_property(IntPtr state, byte[] name);
        [DllImport(Lib)] internal static extern NativeProperty gradd_train_state_property(IntPtr state, int i);

        [DllImport(Lib)] internal static extern NativeOptimizer gradd_train_adamw();
        [DllImport(Lib)] internal static extern NativeOptimizer gradd_train_sgd();
        [DllImport(Lib)] internal static extern int gradd_train_optimizer_load(NativeModel* model, NativeOptimizer* optimizer);
        [DllImport(Lib)] internal static extern int gradd_train_open(IntPtr state, NativeOptions* options, out IntPtr session);
        [DllImport(Lib)] internal static extern void gradd_train_close(IntPtr session);
        [DllImport(Lib)] internal static extern int gradd_train_input_count(IntPtr session, int phase);
        [DllImport(Lib)] internal static extern int gradd_train_output_count(IntPtr session, int phase);
        [DllImport(Lib)] internal static extern IntPtr gradd_train_input_name(IntPtr session, int phase, int i);
        [DllImport(Lib)] internal static extern IntPtr gradd_train_output_name(IntPtr session, int phase, int i);
        [DllImport(Lib)] internal static extern int gradd_train_step(IntPtr session, NativeTensor* inputs, int n, NativeTensor* outputs, IntPtr cancel);
        [DllImport(Lib)] internal static extern int gradd_train_eval_step(IntPtr session, NativeTensor* inputs, int n, NativeTensor* outputs, IntPtr cancel);
        [DllImport(Lib)] internal static extern void gradd_train_lazy_reset_grad(IntPtr session);
        [DllImport(Lib)] internal static extern int gradd_train_optimizer_step(IntPtr session, out double norm);
        [DllImport(Lib)] internal static extern float gradd_train_learning_rate(IntPtr session);
        [DllImport(Lib)] internal static extern int gradd_train_set_learning_rate(IntPtr session, float rate);
        [DllImport(Lib)] internal static extern int gradd_train_set_linear_schedule(IntPtr session, long warmup, long total, float initial);
        [DllImport(Lib)] internal static extern int gradd_train_schedule_step(IntPtr session);
        [DllImport(Lib)] internal static extern void gradd_train_set_seed(IntPtr session, ulong seed);
        [DllImport(Lib)] internal static extern int gradd_train_freeze(IntPtr session, byte[] pattern, out int changed);
        [DllImport(Lib)] internal static extern int gradd_train_thaw(IntPtr session, byte[] pattern, out int changed);
        [DllImport(Lib)] internal static extern int gradd_train_contiguous_count(IntPtr session, byte trainableOnly, out long count);
        [DllImport(Lib)] internal static extern int gradd_train_copy_out(IntPtr session, byte trainableOnly, float[] buffer, long count);
        [DllImport(Lib)] internal static extern int gradd_train_copy_in(IntPtr session, byte trainableOnly, float[] buffer, long count);
        [DllImport(Lib)] internal static extern int gradd_train_export(IntPtr session, byte[] path, IntPtr* outputs, int n);
    }
}
