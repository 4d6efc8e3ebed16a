package ai.gradd.train;

import java.nio.Buffer;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;

/**
 * The native half, train/java/gradd_train_jni.c: one method for each function of gradd_train.h.
 *
 * <p>Handles are addresses of states and sessions. Texts are UTF-8 with a zero at the end; those
 * that come back have none. A type is {dtype, dims...}. Buffers are direct, and begin at their
 * address; those that come back are memory of the state or session.
 */
final class Native {
    static {
        String path = System.getProperty("ai.gradd.train.library");
        if (path != null) {
            System.load(path);
        } else {
            System.loadLibrary("gradd_train_jni");
        }
    }

    private Native() {}

    /** A text for the library; null stays null. */
    static byte[] utf8(Object text) {
        if (text == null) {
            return null;
        }
        if (text.toString().indexOf('\0') >= 0) {
            throw new IllegalArgumentException("a zero inside the text '" + text + "'");
        }
        return (text + "\0").getBytes(StandardCharsets.UTF_8);
    }

    static String text(byte[] utf8) {
        return new String(utf8, StandardCharsets.UTF_8);
    }

    static native byte[] version();

    static native long create() throws TrainException;

    static native long load(byte[] path) throws TrainException;

    static native long loadBytes(byte[] bytes) throws TrainException;

    static native long openState(byte[] path, byte[] checkpoint, long every, long ms)
            throws TrainException;

    static native void keepState(long state, byte[] path, long every, long ms)
            throws TrainException;

    static native void commit(long state) throws TrainException;

    static native void save(long state, byte[] path, boolean withOptimizer) throws TrainException;

    static native void destroy(long state);

    static native void add(long state, byte[] name, long[] type, Buffer data, boolean trainable)
            throws TrainException;

    static native void write(long state, int i, long[] type, Buffer data) throws TrainException;

    static native int parameterCount(long state);

    /** -1 = there is none. */
    static native int findParameter(long state, byte[] name);

    /** {byte[] name, long[] type, ByteBuffer data, ByteBuffer gradient, long[] {trainable}}. */
    static native Object[] parameter(long state, int i) throws TrainException;

    /** {steps of the optimizer, position in the data}. */
    static native long[] progress(long state);

    static native void setPosition(long state, long position);

    /** value: an Integer's or Long's number, a Float's bits; text: of that kind alone. */
    static native void setProperty(long state, byte[] name, int kind, long value, byte[] text)
            throws TrainException;

    /** {long[] {kind, value}, byte[] text}; null = there is none. */
    static native Object[] property(long state, byte[] name);

    /** As Optimizer has it. */
    static native double[] defaults(boolean sgd);

    static native double[] loadOptimizer(byte[] path, byte[] bytes) throws TrainException;

    /** models: byte[] path and bytes of training, path and bytes of eval; each may be null. */
    static native long open(long state, Object[] models, double[] optimizer, long[] numbers)
            throws TrainException;

    static native void close(long session);

    static native byte[][] names(long session, boolean eval, boolean outputs);

    /** {long[] type, ByteBuffer data} of each output, one after the other. */
    static native Object[] step(
            long session, boolean eval, long[][] types, Buffer[] data, ByteBuffer terminate)
            throws TrainException;

    static native void setTerminate(ByteBuffer terminate, boolean value);

    static native void lazyResetGrad(long session);

    static native double optimizerStep(long session) throws TrainException;

    static native float learningRate(long session);

    static native void setLearningRate(long session, float rate) throws TrainException;

    static native void linearSchedule(long session, long warmup, long total, float initial)
            throws TrainException;

    static native void scheduleStep(long session) throws TrainException;

    static native void setSeed(long session, long seed);

    static native int select(long session, byte[] pattern, boolean thaw) throws TrainException;

    static native long contiguousCount(long session, boolean trainableOnly) throws TrainException;

    static native void copyOut(long session, boolean trainableOnly, float[] buffer)
            throws TrainException;

    static native void copyIn(long session, boolean trainableOnly, float[] buffer)
            throws TrainException;

    static native void export(long session, byte[] path, byte[][] outputs) throws TrainException;
}
