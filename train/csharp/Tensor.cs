// Tensors, failures, and optimizers.
using System;
using System.Runtime.InteropServices;

namespace Gradd.Train
{
    /// <summary>What the library refuses, or what fails in it.</summary>
    public sealed class TrainException : Exception
    {
        internal TrainException(string status, string message) : base(message)
        {
            Status = status;
        }

        /// <summary>"TENSOR", "IO" and so on.</summary>
        public string Status { get; }
    }

    /// <summary>An array in row-major order with sizes: float, double, long, int, byte, sbyte or
    /// bool elements. The array is the caller's, and is not copied.</summary>
    public sealed unsafe class Tensor
    {
        public Tensor(Array values, params long[] shape)
        {
            long count = 1;
            foreach (long size in shape)
            {
                count = checked(count * size);
            }
            if (shape.Length > NativeType.MaxRank || count != values.Length || Array.Exists(shape, d => d < 0))
            {
                throw new ArgumentException(
                    values.Length + " elements for the shape [" + string.Join(", ", shape) + "]");
            }
            code = CodeOf(values);
            Values = values;
            Shape = shape;
        }

        public Array Values { get; }
        public long[] Shape { get; }
        private readonly int code;

        /// <summary>The first element: a loss.</summary>
        public float Float => ((float[])Values)[0];

        /// <summary>A copy of memory of the library.</summary>
        internal static Tensor Copied(NativeType type, IntPtr data)
        {
            var shape = new long[type.Rank];
            long count = 1;
            for (int i = 0; i < type.Rank; i++)
            {
                shape[i] = type.Dims[i];
                count *= shape[i];
            }
            Array values = Make(type.DType, count);
            GCHandle pin = GCHandle.Alloc(values, GCHandleType.Pinned);
            long bytes = Buffer.ByteLength(values);
            Buffer.MemoryCopy((void*)data, (void*)pin.AddrOfPinnedObject(), bytes, bytes);
            pin.Free();
            return new Tensor(values, shape);
        }

        /// <summary>As C takes it, for the time of a call.</summary>
        internal void With(Action<NativeTensor> use)
        {
            GCHandle pin = Pin(out NativeTensor native);
            try
            {
                use(native);
            }
            finally
            {
                pin.Free();
            }
        }

        internal GCHandle Pin(out NativeTensor native)
        {
            NativeTensor made = default(NativeTensor);
            made.Type.DType = code;
            made.Type.Rank = Shape.Length;
            for (int i = 0; i < Shape.Length; i++)
            {
                made.Type.Dims[i] = Shape[i];
            }
            GCHandle pin = GCHandle.Alloc(Values, GCHandleType.Pinned);
            made.Data = pin.AddrOfPinnedObject();
            native = made;
            return pin;
        }

        // ONNX's codes.
        private static int CodeOf(Array values)
        {
            Type type = values.GetType();
            return type == typeof(float[]) ? 1 : type == typeof(byte[]) ? 2 : type == typeof(sbyte[]) ? 3
                : type == typeof(int[]) ? 6 : type == typeof(long[]) ? 7 : type == typeof(bool[]) ? 9
                : type == typeof(double[]) ? 11
                : throw new ArgumentException("a tensor of " + type);
        }

        private static Array Make(int code, long n)
        {
            switch (code)
            {
                case 1: return new float[n];
                case 2: return new byte[n];
                case 3: return new sbyte[n];
                case 6: return new int[n];
                case 7: return new long[n];
                case 9: return new bool[n];
                case 11: return new double[n];
                default: throw new NotSupportedException("elements of ONNX's type " + code);
            }
        }
    }

    /// <summary>An optimizer and its constants.</summary>
    public sealed unsafe class Optimizer
    {
        internal NativeOptimizer Native;

        private Optimizer(NativeOptimizer native)
        {
            Native = native;
        }

        /// <summary>torch's: 0.9, 0.999, 1e-8, weight decay 0.01, bias correction.</summary>
        public static Optimizer AdamW() => new Optimizer(Train.Native.gradd_train_adamw());

        /// <summary>Without momentum and weight decay.</summary>
        public static Optimizer Sgd() => new Optimizer(Train.Native.gradd_train_sgd());

        /// <summary>Kind and constants of an optimizer model, as ONNX Runtime writes them.</summary>
        public static Optimizer Load(string path)
        {
            NativeOptimizer loaded;
            fixed (byte* at = Train.Native.Utf8(path))
            {
                var model = new NativeModel { Path = (IntPtr)at };
                Train.Native.Check(Train.Native.gradd_train_optimizer_load(&model, &loaded));
            }
            return new Optimizer(loaded);
        }

        public double WeightDecay { get => Native.WeightDecay; set => Native.WeightDecay = value; }

        /// <summary>Of SGD.</summary>
        public double Momentum { get => Native.Momentum; set => Native.Momentum = value; }

        /// <summary>Clips the norm of all gradients together; 0 = not clipped.</summary>
        public double MaxNorm { get => Native.MaxNorm; set => Native.MaxNorm = value; }
    }
}
