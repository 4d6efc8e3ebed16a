package ai.gradd.train;

import java.nio.Buffer;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;
import java.nio.IntBuffer;
import java.nio.LongBuffer;
import java.util.Arrays;

/**
 * Elements with a type and a shape, contiguous and row-major, in memory outside Java's heap.
 *
 * <p>Direct buffers in the byte order of the machine are used where they are, from their position
 * to their limit; arrays and other buffers are copied.
 */
public final class Tensor {
    /** Element types; codes are ONNX's. Bool is a byte. */
    public enum Type {
        F32(1, 4), U8(2, 1), I8(3, 1), U16(4, 2), I16(5, 2), I32(6, 4), I64(7, 8), BOOL(9, 1),
        F16(10, 2), F64(11, 8), U32(12, 4), U64(13, 8), BF16(16, 2);

        final int code;
        final int bytes;

        Type(int code, int bytes) {
            this.code = code;
            this.bytes = bytes;
        }

        static Type of(long code) {
            for (Type type : values()) {
                if (type.code == code) {
                    return type;
                }
            }
            throw new IllegalArgumentException("an unknown element type, " + code);
        }
    }

    private final Type type;
    private final long[] shape;
    final Buffer data;

    private Tensor(Type type, long[] shape, Buffer data, long elements) {
        long count = 1;
        for (long size : shape) {
            if (size < 0) {
                throw new IllegalArgumentException("a negative size, " + Arrays.toString(shape));
            }
            count = Math.multiplyExact(count, size);
        }
        if (count != elements) {
            throw new IllegalArgumentException(
                    elements + " elements for the shape " + Arrays.toString(shape));
        }
        this.type = type;
        this.shape = shape;
        this.data = data;
    }

    public static Tensor createTensor(float[] values, long... shape) {
        return createTensor(FloatBuffer.wrap(values), shape);
    }

    public static Tensor createTensor(long[] values, long... shape) {
        return createTensor(LongBuffer.wrap(values), shape);
    }

    public static Tensor createTensor(int[] values, long... shape) {
        ByteBuffer copy = allocate(4L * values.length);
        copy.asIntBuffer().put(values);
        return new Tensor(Type.I32, shape.clone(), copy, values.length);
    }

    public static Tensor createTensor(FloatBuffer values, long... shape) {
        if (values.isDirect() && values.order() == ByteOrder.nativeOrder()) {
            return new Tensor(Type.F32, shape.clone(), values.slice(), values.remaining());
        }
        ByteBuffer copy = allocate(4L * values.remaining());
        copy.asFloatBuffer().put(values.duplicate());
        return new Tensor(Type.F32, shape.clone(), copy, values.remaining());
    }

    public static Tensor createTensor(LongBuffer values, long... shape) {
        if (values.isDirect() && values.order() == ByteOrder.nativeOrder()) {
            return new Tensor(Type.I64, shape.clone(), values.slice(), values.remaining());
        }
        ByteBuffer copy = allocate(8L * values.remaining());
        copy.asLongBuffer().put(values.duplicate());
        return new Tensor(Type.I64, shape.clone(), copy, values.remaining());
    }

    /** Elements of any type, in the byte order of the machine, whatever order the buffer has. */
    public static Tensor createTensor(ByteBuffer values, Type type, long... shape) {
        int bytes = values.remaining();
        if (bytes % type.bytes != 0) {
            throw new IllegalArgumentException(bytes + " bytes are no elements of " + type);
        }
        ByteBuffer data = values.isDirect() ? values.slice() : copyOf(values);
        return new Tensor(type, shape.clone(), data, bytes / type.bytes);
    }

    /** A copy of memory of the library. */
    static Tensor copied(Object type, Object memory) {
        long[] sizes = (long[]) type;
        long[] shape = Arrays.copyOfRange(sizes, 1, sizes.length);
        return createTensor(copyOf((ByteBuffer) memory), Type.of(sizes[0]), shape);
    }

    private static ByteBuffer copyOf(ByteBuffer values) {
        ByteBuffer copy = allocate(values.remaining());
        copy.put(values.duplicate());
        copy.flip();
        return copy;
    }

    private static ByteBuffer allocate(long bytes) {
        return ByteBuffer.allocateDirect(Math.toIntExact(bytes)).order(ByteOrder.nativeOrder());
    }

    public Type getType() {
        return type;
    }

    public long[] getShape() {
        return shape.clone();
    }

    /** Throws IllegalStateException for another type, as the next two do. */
    public FloatBuffer getFloatBuffer() {
        if (data instanceof FloatBuffer) {
            return ((FloatBuffer) data).duplicate();
        }
        return bytesOf(Type.F32).asFloatBuffer();
    }

    public LongBuffer getLongBuffer() {
        if (data instanceof LongBuffer) {
            return ((LongBuffer) data).duplicate();
        }
        return bytesOf(Type.I64).asLongBuffer();
    }

    public IntBuffer getIntBuffer() {
        return bytesOf(Type.I32).asIntBuffer();
    }

    /** Throws IllegalStateException for a tensor of a caller's FloatBuffer or LongBuffer. */
    public ByteBuffer getByteBuffer() {
        return bytesOf(type);
    }

    /** The first element: a loss. */
    public float getFloat() {
        return getFloatBuffer().get(0);
    }

    private ByteBuffer bytesOf(Type wanted) {
        if (type != wanted || !(data instanceof ByteBuffer)) {
            throw new IllegalStateException("a tensor of " + type + " in a " + data.getClass());
        }
        return ((ByteBuffer) data).duplicate().order(ByteOrder.nativeOrder());
    }

    /** As the native half takes it. */
    long[] typed() {
        long[] typed = new long[1 + shape.length];
        typed[0] = type.code;
        System.arraycopy(shape, 0, typed, 1, shape.length);
        return typed;
    }
}
