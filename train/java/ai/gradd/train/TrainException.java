package ai.gradd.train;

import java.nio.charset.StandardCharsets;

/** What the library refuses, or what fails in it: the name of its status, and its sentence. */
public final class TrainException extends Exception {
    private static final long serialVersionUID = 1;
    private final String status;

    /** Called by the native half, with UTF-8. */
    TrainException(byte[] status, byte[] sentence) {
        super(new String(sentence, StandardCharsets.UTF_8));
        this.status = new String(status, StandardCharsets.UTF_8);
    }

    /** "TENSOR", "IO", "MODEL" and so on: train/gradd_train.h says which call fails with which. */
    public String getStatus() {
        return status;
    }

    @Override
    public String toString() {
        return status + ": " + getMessage();
    }
}
