/**
 * What RoundWorker.kt uses of androidx.work 2.10, with the signatures and rules of the real classes; each function does
 * as much as a test needs. The library itself is not to be had where the tests run.
 */
package androidx.work

import android.content.Context
import java.util.concurrent.TimeUnit

public abstract class Worker(context: Context, workerParams: WorkerParameters) :
    ListenableWorker(context, workerParams) {
    public abstract fun doWork(): Result
}

public enum class NetworkType { NOT_REQUIRED, CONNECTED, UNMETERED, NOT_ROAMING, METERED, TEMPORARILY_UNMETERED }

public enum class ExistingPeriodicWorkPolicy { REPLACE, KEEP, UPDATE, CANCEL_AND_REENQUEUE }

public enum class BackoffPolicy { EXPONENTIAL, LINEAR }

public interface Operation

public class Data internal constructor(private val values: Map<String, Any?>) {
    public fun getString(key: String): String? = values[key] as? String

    public class Builder {
        private val values = mutableMapOf<String, Any?>()

        public fun putString(key: String, value: String?): Builder = apply { values[key] = value }

        public fun build(): Data = Data(values.toMap())
    }
}

public class Constraints internal constructor(
    public val requiredNetworkType: NetworkType,
    private val requiresCharging: Boolean,
    private val requiresDeviceIdle: Boolean,
) {
    public fun requiresCharging(): Boolean = requiresCharging

    public fun requiresDeviceIdle(): Boolean = requiresDeviceIdle

    public class Builder {
        private var requiresCharging = false
        private var requiresDeviceIdle = false
        private var requiredNetworkType = NetworkType.NOT_REQUIRED

        public fun setRequiresCharging(requiresCharging: Boolean): Builder =
            apply { this.requiresCharging = requiresCharging }

        public fun setRequiresDeviceIdle(requiresDeviceIdle: Boolean): Builder =
            apply { this.requiresDeviceIdle = requiresDeviceIdle }

        public fun setRequiredNetworkType(networkType: NetworkType): Builder =
            apply { requiredNetworkType = networkType }

        public fun build(): Constraints = Constraints(requiredNetworkType, requiresCharging, requiresDeviceIdle)
    }
}

public abstract class WorkRequest internal constructor(
    public val workerClassName: String, public val constraints: Constraints, public val intervalMillis: Long,
) {
    public abstract class Builder<B : Builder<B, *>, W : WorkRequest>
    internal constructor(internal val workerClass: Class<out ListenableWorker>) {
        internal var backoffCriteriaSet = false
        internal var constraints: Constraints = Constraints.Builder().build()
        internal abstract val thisObject: B

        public fun setConstraints(constraints: Constraints): B {
            this.constraints = constraints
            return thisObject
        }

        @Suppress("UNUSED_PARAMETER")
        public fun setBackoffCriteria(backoffPolicy: BackoffPolicy, backoffDelay: Long, timeUnit: TimeUnit): B {
            backoffCriteriaSet = true
            return thisObject
        }

        public fun build(): W = buildInternal()

        internal abstract fun buildInternal(): W
    }
}

public class PeriodicWorkRequest internal constructor(builder: Builder) :
    WorkRequest(builder.workerClass.name, builder.constraints, builder.intervalMillis) {
    public class Builder(
        workerClass: Class<out ListenableWorker>, repeatInterval: Long, repeatIntervalTimeUnit: TimeUnit,
    ) : WorkRequest.Builder<Builder, PeriodicWorkRequest>(workerClass) {
        internal val intervalMillis = repeatIntervalTimeUnit.toMillis(repeatInterval)
        override val thisObject: Builder get() = this

        override fun buildInternal(): PeriodicWorkRequest {
            require(!(backoffCriteriaSet && constraints.requiresDeviceIdle())) {
                "Cannot set backoff criteria on an idle mode job"
            }
            return PeriodicWorkRequest(this)
        }
    }
}

public abstract class WorkManager internal constructor() {
    public abstract fun enqueueUniquePeriodicWork(
        uniqueWorkName: String, existingPeriodicWorkPolicy: ExistingPeriodicWorkPolicy, request: PeriodicWorkRequest,
    ): Operation

    public abstract fun cancelUniqueWork(uniqueWorkName: String): Operation

    public companion object {
        @JvmStatic
        @Suppress("UNUSED_PARAMETER")
        public fun getInstance(context: Context): WorkManager = Recorder
    }
}

/** The test's own: remembers what was enqueued, and makes workers as WorkManager's default factory does. */
public object Recorder : WorkManager() {
    public val enqueued: MutableMap<String, Pair<ExistingPeriodicWorkPolicy, PeriodicWorkRequest>> = mutableMapOf()

    override fun enqueueUniquePeriodicWork(
        uniqueWorkName: String, existingPeriodicWorkPolicy: ExistingPeriodicWorkPolicy, request: PeriodicWorkRequest,
    ): Operation {
        enqueued[uniqueWorkName] = existingPeriodicWorkPolicy to request
        return object : Operation {}
    }

    override fun cancelUniqueWork(uniqueWorkName: String): Operation {
        enqueued.remove(uniqueWorkName)
        return object : Operation {}
    }

    public fun worker(request: WorkRequest, context: Context, attempts: Int): Worker =
        Class.forName(request.workerClassName).asSubclass(Worker::class.java)
            .getDeclaredConstructor(Context::class.java, WorkerParameters::class.java)
            .newInstance(context, WorkerParameters(attempts))
}
