/** Takes part in rounds while the device is idle, charging and on an unmetered network. */
package tfpfl.android

import android.content.Context
import androidx.work.Constraints
import androidx.work.Data
import androidx.work.ExistingPeriodicWorkPolicy
import androidx.work.NetworkType
import androidx.work.Operation
import androidx.work.PeriodicWorkRequest
import androidx.work.WorkManager
import androidx.work.Worker
import androidx.work.WorkerParameters
import java.io.File
import java.io.IOException
import java.util.concurrent.TimeUnit
import tfpfl.Client
import tfpfl.Examples
import tfpfl.TfpflException

/** What a round of the server asks of this client: `payload` is "float32" or "int8". */
class Invitation(val round: String, val theta: FloatArray, val payload: String = "float32")

/** What leaves the device: the gradient, the number of examples, and the training loss if the server asks for it. */
class Delivery(val round: String, val payload: ByteArray, val numExamples: Int, val loss: Float)

/** The way to the server. Both functions may block, and throw an [IOException] if there is no way to it now. */
interface RoundServer {
    /** The round that this client is to take part in; null: none now. */
    fun invitation(): Invitation?

    /**
     * True if the server has taken the update, false if it refuses it for good. If that is not known, such as when the
     * answer was lost, throw: the same bytes are delivered again, so the server must know them again by their round.
     */
    fun deliver(delivery: Delivery): Boolean
}

/** What the worker needs of an app: the class of its `Application` implements it. */
interface RoundApp {
    val roundServer: RoundServer

    /**
     * Opens the bundle with the file that keeps the head, and gives the client [keptTheta] by [receiveKept]; the worker
     * closes it. No other client may use the file of the head.
     */
    fun openClient(): Client

    /**
     * The file that keeps an update until the server has answered. It has a head, which must not leave the device: it
     * lies in noBackupFilesDir. (Auto Backup uploads what is in filesDir, and a second phone would deliver the update.)
     */
    val pending: File

    /** The file that keeps the theta of the last round that the server has taken, with which the head was fitted. */
    val keptTheta: File

    /** The client's own examples, as `client` takes them; null: there are too few for a round. */
    fun examples(client: Client): Examples?

    /** What a run of the worker came to. An app may log it. After TAKEN or REFUSED, an error is one of the files. */
    fun finished(outcome: Outcome, error: Exception?) = Unit
}

/**
 * What a run of the worker came to. After [TAKEN] the head is another one, and after others it is not; but for
 * [UNUSABLE] where the disk took the new head and failed afterwards: then the next run says [TAKEN].
 */
enum class Outcome { TAKEN, REFUSED, NO_ROUND, NO_EXAMPLES, STOPPED, UNREACHABLE, UNUSABLE }

/**
 * One round: the invitation, the gradient of the client's loss, its delivery; and the head of the round becomes the
 * client's when the server has taken the update. If the server refuses it, or anything throws, the old head stays. An
 * update without an answer is kept, and the next run delivers it again, and does nothing else.
 *
 * It succeeds if it was [Outcome.TAKEN], refused, or there was nothing to do. Without a way to the server it is tried
 * again, up to [MOST_ATTEMPTS] times in a period. What the core refuses, or a disk that does not take or give the
 * update ([Outcome.UNUSABLE]), fails, with the message as "error"; it is tried again in the next period. Other
 * exceptions are the app's own, also an [IOException] that is not of its [RoundServer], and WorkManager's to report.
 */
class RoundWorker(context: Context, parameters: WorkerParameters) : Worker(context, parameters) {
    override fun doWork(): Result {
        val app = applicationContext as? RoundApp
        checkNotNull(app) { "the app's Application does not implement tfpfl.android.RoundApp" }
        return try {
            val outcome = takePart(app)
            app.finished(outcome, ofTheFiles)
            Result.success(Data.Builder().putString(OUTCOME, outcome.name).build())
        } catch (error: Unreachable) {
            app.finished(Outcome.UNREACHABLE, error.why)
            if (runAttemptCount + 1 < MOST_ATTEMPTS) Result.retry() else failure(Outcome.UNREACHABLE, error.why)
        } catch (error: TfpflException) {
            app.finished(Outcome.UNUSABLE, error)
            failure(Outcome.UNUSABLE, error)
        } catch (error: PendingException) {
            app.finished(Outcome.UNUSABLE, error)
            failure(Outcome.UNUSABLE, error)
        }
    }

    private fun takePart(app: RoundApp): Outcome {
        Pending.load(app.pending)?.let { kept -> return app.openClient().use { deliver(app, it, kept) } }
        val invitation = reached { app.roundServer.invitation() } ?: return Outcome.NO_ROUND
        return app.openClient().use { client ->
            val examples = app.examples(client) ?: return Outcome.NO_EXAMPLES
            val update = client.round(invitation.theta, examples, invitation.payload)
            if (isStopped) return Outcome.STOPPED // the device is in use again, or no longer charging
            deliver(app, client, Pending(invitation.round, update, invitation.theta).also { it.save(app.pending) })
        }
    }

    /** Once the server has taken an update its head is committed, even if the worker was stopped meanwhile. */
    private fun deliver(app: RoundApp, client: Client, pending: Pending): Outcome {
        val update = pending.update
        val delivery = Delivery(pending.round, update.payload, update.numExamples, update.loss)
        val taken = reached { app.roundServer.deliver(delivery) }
        val before = if (taken) contentOf(app.keptTheta) else null
        try {
            if (taken) {
                // Theta first: a process that is killed between the two would leave a head without its theta.
                tried { keepTheta(app.keptTheta, pending.theta) }
                client.commit(update)
            }
        } catch (error: TfpflException) {
            if (error.status == SYSTEM_ERROR) throw error // such as a full disk: it is tried again
            tried { putBack(app.keptTheta, before) }
            tried { Pending.delete(app.pending) } // its head is of no use any more: the app has saved another one
            throw error
        }
        tried { Pending.delete(app.pending) }
        return if (taken) Outcome.TAKEN else Outcome.REFUSED
    }

    private var ofTheFiles: PendingException? = null

    /**
     * What the server has answered stays so if the update does not go: then it gets the same bytes again. Without its
     * theta the head is stale after the next start, and still works.
     */
    private fun tried(work: () -> Unit) {
        try {
            work()
        } catch (error: PendingException) {
            ofTheFiles = error
        }
    }

    /** What the server answers. Its exceptions alone say that there is no way to it: disk and app have others. */
    private fun <T> reached(ask: () -> T): T =
        try {
            ask()
        } catch (error: IOException) {
            throw Unreachable(error)
        }

    private class Unreachable(val why: IOException) : Exception(why)

    private fun failure(outcome: Outcome, error: Exception): Result =
        Result.failure(Data.Builder().putString(OUTCOME, outcome.name).putString(ERROR, error.message).build())

    companion object {
        const val NAME = "tfpfl.round"
        const val OUTCOME = "outcome"
        const val ERROR = "error"
        const val MOST_ATTEMPTS = 3
        private const val SYSTEM_ERROR = 4 // of tfpfl_status in tfpfl_device.h

        /** When a round may run. There is no backoff of one's own: WorkManager allows none for idle devices. */
        fun constraints(): Constraints = Constraints.Builder()
            .setRequiresCharging(true)
            .setRequiresDeviceIdle(true)
            .setRequiredNetworkType(NetworkType.UNMETERED)
            .build()

        /** Looks for a round every `hours` from now on, after restarts too. It may be called at every start. */
        fun schedule(context: Context, hours: Long = 24): Operation {
            val request = PeriodicWorkRequest.Builder(RoundWorker::class.java, hours, TimeUnit.HOURS)
                .setConstraints(constraints())
                .build()
            return WorkManager.getInstance(context)
                .enqueueUniquePeriodicWork(NAME, ExistingPeriodicWorkPolicy.UPDATE, request)
        }

        fun cancel(context: Context): Operation = WorkManager.getInstance(context).cancelUniqueWork(NAME)
    }
}
