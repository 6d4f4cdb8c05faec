package androidx.work;

public final class WorkerParameters {
    private final int attempts;

    /** The test's own: WorkManager makes these objects. */
    public WorkerParameters(int runAttemptCount) {
        attempts = runAttemptCount;
    }

    public int getRunAttemptCount() {
        return attempts;
    }
}
