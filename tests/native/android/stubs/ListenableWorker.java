package androidx.work;

import android.content.Context;
import androidx.annotation.NonNull;

public abstract class ListenableWorker {
    private final Context context;
    private final WorkerParameters parameters;
    private volatile boolean stopped;

    public ListenableWorker(@NonNull Context appContext, @NonNull WorkerParameters workerParams) {
        context = appContext;
        parameters = workerParams;
    }

    public final @NonNull Context getApplicationContext() {
        return context;
    }

    public final int getRunAttemptCount() {
        return parameters.getRunAttemptCount();
    }

    public final boolean isStopped() {
        return stopped;
    }

    public final void stop() {
        stopped = true;
    }

    public abstract static class Result {
        private final Data data;

        private Result(Data outputData) {
            data = outputData;
        }

        public static @NonNull Result success() {
            return new Success(new Data.Builder().build());
        }

        public static @NonNull Result success(@NonNull Data outputData) {
            return new Success(outputData);
        }

        public static @NonNull Result retry() {
            return new Retry();
        }

        public static @NonNull Result failure() {
            return new Failure(new Data.Builder().build());
        }

        public static @NonNull Result failure(@NonNull Data outputData) {
            return new Failure(outputData);
        }

        public @NonNull Data getOutputData() {
            return data;
        }

        public static final class Success extends Result {
            Success(Data outputData) {
                super(outputData);
            }
        }

        public static final class Failure extends Result {
            Failure(Data outputData) {
                super(outputData);
            }
        }

        public static final class Retry extends Result {
            Retry() {
                super(new Data.Builder().build());
            }
        }
    }
}
