package ai.gradd.train;

import java.nio.ByteBuffer;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;

/**
 * What a training has learnt: parameters, what the optimizer knows of them, and properties.
 *
 * <p>A state may be used by several threads, one after the other: methods wait for one another, and
 * for the steps of its session. It is closed after its session.
 */
public final class CheckpointState implements AutoCloseable {
    private static final int INT = 0;
    private static final int FLOAT = 1;
    private static final int TEXT = 2;
    private long handle;
    boolean inSession;

    /** An empty state. */
    public CheckpointState() throws TrainException {
        this(Native.create());
    }

    private CheckpointState(long handle) {
        this.handle = handle;
    }

    public static CheckpointState loadCheckpoint(Path path) throws TrainException {
        return new CheckpointState(Native.load(Native.utf8(path)));
    }

    public static CheckpointState loadCheckpoint(byte[] bytes) throws TrainException {
        return new CheckpointState(Native.loadBytes(bytes));
    }

    /**
     * The state in a file, which survives a loss of power, committed every second or after so many
     * steps. A file that is not there is made of the checkpoint; null: that is an error.
     */
    public static CheckpointState open(Path path, Path checkpoint, long commitEvery)
            throws TrainException {
        byte[] from = Native.utf8(checkpoint);
        return new CheckpointState(Native.openState(Native.utf8(path), from, commitEvery, 0));
    }

    /** From now on in that file, in place of what is there. */
    public synchronized void keep(Path path, long commitEvery) throws TrainException {
        Native.keepState(handle(), Native.utf8(path), commitEvery, 0);
    }

    /** Of a state in a file: commits what there is. */
    public synchronized void commit() throws TrainException {
        Native.commit(handle());
    }

    public synchronized void saveCheckpoint(Path path, boolean saveOptimizer)
            throws TrainException {
        Native.save(handle(), Native.utf8(path), saveOptimizer);
    }

    /** Adds a parameter; values are copied. */
    public synchronized void addParameter(String name, Tensor values, boolean trainable)
            throws TrainException {
        Native.add(handle(), Native.utf8(name), values.typed(), values.data, trainable);
    }

    public synchronized List<String> getParameterNames() throws TrainException {
        List<String> names = new ArrayList<>();
        for (int i = 0; i < Native.parameterCount(handle()); i++) {
            names.add(Native.text((byte[]) Native.parameter(handle, i)[0]));
        }
        return names;
    }

    /** A copy of its values; null = it has none yet. */
    public Tensor getParameter(String name) throws TrainException {
        return part(name, 2);
    }

    /** A copy of the sum since the last reset; null = there is none. */
    public Tensor getGradient(String name) throws TrainException {
        return part(name, 3);
    }

    public synchronized boolean requiresGrad(String name) throws TrainException {
        return ((long[]) Native.parameter(handle(), at(name))[4])[0] != 0;
    }

    public synchronized void updateParameter(String name, Tensor values) throws TrainException {
        Native.write(handle(), at(name), values.typed(), values.data);
    }

    /** Steps that the optimizer has taken. */
    public synchronized long getStep() {
        return Native.progress(handle())[0];
    }

    /** In the data, as the caller counts it. */
    public synchronized long getPosition() {
        return Native.progress(handle())[1];
    }

    public synchronized void setPosition(long position) {
        Native.setPosition(handle(), position);
    }

    /** Adds a property, or replaces the one of that name, as the next two do. */
    public synchronized void addProperty(String name, long value) throws TrainException {
        Native.setProperty(handle(), Native.utf8(name), INT, value, null);
    }

    public synchronized void addProperty(String name, float value) throws TrainException {
        Native.setProperty(handle(), Native.utf8(name), FLOAT, Float.floatToIntBits(value), null);
    }

    public synchronized void addProperty(String name, String value) throws TrainException {
        Native.setProperty(handle(), Native.utf8(name), TEXT, 0, Native.utf8(value));
    }

    /** Throws IllegalArgumentException if there is none of that name and kind, as the others do. */
    public long getIntProperty(String name) {
        return ((long[]) property(name, INT)[0])[1];
    }

    public float getFloatProperty(String name) {
        return Float.intBitsToFloat((int) ((long[]) property(name, FLOAT)[0])[1]);
    }

    public String getStringProperty(String name) {
        return Native.text((byte[]) property(name, TEXT)[1]);
    }

    /** Throws IllegalStateException while its session is open. */
    @Override
    public synchronized void close() {
        if (inSession) {
            throw new IllegalStateException("the session of this state is open");
        }
        if (handle != 0) {
            Native.destroy(handle);
        }
        handle = 0;
    }

    long handle() {
        if (handle == 0) {
            throw new IllegalStateException("this state is closed");
        }
        return handle;
    }

    private synchronized Tensor part(String name, int which) throws TrainException {
        Object[] parameter = Native.parameter(handle(), at(name));
        Object memory = parameter[which];
        return memory == null ? null : Tensor.copied(parameter[1], (ByteBuffer) memory);
    }

    private int at(String name) {
        int i = Native.findParameter(handle(), Native.utf8(name));
        if (i < 0) {
            throw new IllegalArgumentException("there is no parameter '" + name + "'");
        }
        return i;
    }

    private synchronized Object[] property(String name, int kind) {
        Object[] found = Native.property(handle(), Native.utf8(name));
        if (found == null || ((long[]) found[0])[0] != kind) {
            throw new IllegalArgumentException("no such property '" + name + "' of this kind");
        }
        return found;
    }
}
