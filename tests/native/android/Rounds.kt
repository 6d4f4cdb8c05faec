// Runs RoundWorker with servers that take, refuse and fail: RoundsKt LIBLITERT FOLDER. The bundle is FOLDER/bundle.
import android.app.Application
import android.system.Os
import androidx.work.ListenableWorker.Result
import androidx.work.NetworkType
import androidx.work.Recorder
import androidx.work.Worker
import java.io.File
import java.io.IOException
import java.nio.ByteBuffer
import java.nio.ByteOrder.LITTLE_ENDIAN
import tfpfl.Client
import tfpfl.Examples
import tfpfl.Head
import tfpfl.TfpflException
import tfpfl.android.Delivery
import tfpfl.android.Invitation
import tfpfl.android.Outcome
import tfpfl.android.RoundServer
import tfpfl.android.RoundWorker
import tfpfl.android.receiveKept

/** An app whose files lie in `folder`; off a phone, LiteRT's library needs a path. */
class App(private val litert: String, private val folder: File) : PersonalApp() {
    private fun buffer(name: String) = ByteBuffer.wrap(File(folder, name).readBytes()).order(LITTLE_ENDIAN)
    private fun floats(name: String) = buffer(name).asFloatBuffer().let { b -> FloatArray(b.remaining()) { b.get() } }
    private val labels = buffer("y.bin").asIntBuffer().let { b -> IntArray(b.remaining()) { b.get() } }
    val data = Examples(floats("x.bin"), labels)
    val theta = floats("theta.bin")
    val state = File(folder, "head.bin")
    var client: Client? = null
    var outcomes = listOf<String>()
    var source: (Client) -> Examples? = { data }
    override lateinit var roundServer: RoundServer

    override fun getNoBackupFilesDir() = folder

    override fun openClient() =
        Client(File(noBackupFilesDir, "bundle").path, state.path, litert).receiveKept(keptTheta).also { client = it }

    override fun examples(client: Client): Examples? = source(client)

    override fun finished(outcome: Outcome, error: Exception?) {
        outcomes += "$outcome" + if (error == null) "" else " (${error.message})"
    }
}

class Server(
    private val invitation: () -> Invitation?, private val answer: (ByteArray) -> Boolean,
) : RoundServer {
    var delivered = listOf<String>()
    var asked = false

    override fun invitation() = invitation.invoke().also { asked = true }

    override fun deliver(delivery: Delivery): Boolean {
        check(delivery.loss > 0)
        delivered += "${delivery.round} ${delivery.payload.size} ${delivery.numExamples}"
        return answer(delivery.payload)
    }
}

fun said(result: Result): String {
    val (outcome, error) = listOf(RoundWorker.OUTCOME, RoundWorker.ERROR).map { result.outputData.getString(it) }
    return "${result.javaClass.simpleName} $outcome $error"
}

fun isClosed(client: Client?): Boolean =
    try {
        client?.head
        client == null
    } catch (error: IllegalStateException) {
        error.message == "this client is closed"
    }

fun main(arguments: Array<String>) {
    val folder = File(arguments[1])
    val app = App(arguments[0], folder)
    RoundWorker.schedule(app, hours = 6)
    app.onCreate()
    val (policy, request) = Recorder.enqueued.getValue(RoundWorker.NAME)
    val rules = request.constraints
    check(rules.requiresCharging() && rules.requiresDeviceIdle() && rules.requiredNetworkType == NetworkType.UNMETERED)
    println("${Recorder.enqueued.keys} $policy ${request.intervalMillis}")

    var attempts = 0
    lateinit var worker: Worker

    /** One run of the worker: what it returned, whether the head file changed, what the server got. */
    fun run(
        name: String, invitation: () -> Invitation? = { Invitation("r7", app.theta) },
        answer: (ByteArray) -> Boolean = { true },
    ) {
        val server = Server(invitation, answer)
        app.roundServer = server
        app.outcomes = listOf()
        app.client = null
        val before = if (app.state.exists()) app.state.readBytes() else null
        worker = Recorder.worker(request, app, attempts)
        val synced = Os.synced
        val returned = try {
            said(worker.doWork())
        } catch (error: Exception) {
            "threw ${error.message}"
        }
        val after = if (app.state.exists()) app.state.readBytes() else null
        val head = if (after.contentEquals(before)) "old head" else "new head"
        val left = (folder.list() ?: arrayOf()).filter { it.startsWith("update") }.sorted()
        val what = "$name: $returned; $head; ${server.delivered}; ${app.outcomes}; $left; asked ${server.asked}"
        println("$what; ${Os.synced - synced} synced") // the folder: for a new update, and for one that is deleted
        check(isClosed(app.client)) { "the client is left open" }
        check(Os.open() == 0) { "the folder is left open" }
    }

    run("refused at first", answer = { false })
    run("taken", answer = { File(folder, "first.payload").writeBytes(it).let { true } })
    app.state.copyTo(File(folder, "first.head"))
    fun isStale() = app.openClient().use { it.headIsStale }
    check(!isStale()) { "the head's theta was not kept" }
    val kept = app.keptTheta.readBytes()
    check(kept.contentEquals(File(folder, "theta.bin").readBytes())) { "another theta was kept" }
    for (other in listOf(kept.copyOf(kept.size - 4), ByteArray(kept.size), ByteArray(0))) {
        app.keptTheta.writeBytes(other)
        check(isStale()) { "a theta was taken that is not the head's" }
    }
    app.keptTheta.delete()
    check(isStale()) { "no theta is there" }
    run("refused", answer = { false })
    run("lost") { payload ->
        File(folder, "lost.payload").writeBytes(payload)
        throw IOException("the network is gone")
    }
    attempts = 1
    run("lost again", answer = { throw IOException("the network is gone") })
    attempts = 2
    run("lost a third time", answer = { throw IOException("the network is gone") })
    attempts = 0
    run("sent again", answer = { File(folder, "second.payload").writeBytes(it).let { true } })
    app.state.copyTo(File(folder, "second.head"))
    run("no way to the invitation", invitation = { throw IOException("no address") })
    run("an error of the app", answer = { throw IllegalArgumentException("a bug") })
    run("sent again, and refused", answer = { false })
    run("lost", answer = { throw IOException("the network is gone") })
    app.pending.writeBytes(app.pending.readBytes().also { it[it.size / 2]++ })
    run("damaged", invitation = { null })
    app.pending.writeBytes(ByteArray(3))
    run("cut off", invitation = { null })
    run("lost", answer = { throw IOException("the network is gone") })
    app.openClient().use { client ->
        val names = "[\"a\",\"b\",\"c\",\"d\"]".encodeToByteArray()
        val head = client.head
        client.startFrom(Head(head.kernel, head.bias, head.thetaSha256, names))
        run("taken, but the classes have changed")
        client.startFrom(head)
    }
    app.openClient().use { own ->
        val old = own.head
        val head = Head(FloatArray(old.kernel.size) { 2 * old.kernel[it] }, old.bias, old.thetaSha256, old.names)
        val half = FloatArray(app.theta.size) { app.theta[it] / 2 }
        run("taken, but the app has saved a head", { Invitation("r7", half) }) { _ -> true.also { own.startFrom(head) } }
        check(!isStale()) { "the theta of the app's head is gone" }
        run("taken, while the app has a client")
        val saved = app.state.readBytes()
        try {
            own.startFrom(head)
        } catch (error: TfpflException) {
            println(error.message)
        }
        check(app.state.readBytes().contentEquals(saved)) { "the head of the round is gone" }
        app.openClient().use { again -> again.startFrom(old) } // for the rounds that follow
    }
    run("no round", invitation = { null })
    run("another theta", invitation = { Invitation("r8", app.theta.copyOf(3)) })
    run("another payload", invitation = { Invitation("r8", app.theta, "int4") })
    app.source = { null }
    run("no examples")
    app.source = { Examples(app.data.x, IntArray(app.theta.size)) }
    run("wrong examples")
    app.source = { worker.stop().let { app.data } }
    run("stopped before it was sent")
    app.source = { app.data }
    run("taken, and stopped", { Invitation("r8", app.theta, "int8") }) { payload ->
        worker.stop()
        File(folder, "third.payload").writeBytes(payload)
        true
    }
    app.state.copyTo(File(folder, "third.head"))

    // A disk that does not write, read or delete: folders with something in them in place of files
    fun blocked(file: File) = File(file, "something").mkdirs().let { file }
    blocked(File(folder, "update.bin.new"))
    run("cannot be kept")
    File(folder, "update.bin.new").deleteRecursively()
    Os.broken = true
    run("kept, but perhaps not for long")
    Os.broken = false
    run("sent at last", answer = { true.also { Os.broken = true } })
    Os.broken = false
    run("taken, but its file stays", { Invitation("r9", app.theta) }) { _ ->
        app.pending.delete()
        blocked(app.pending)
        true
    }
    run("cannot be read")
    app.pending.deleteRecursively()
    app.source = { throw IOException("a file of the app is gone") }
    run("an error of the app's disk")
    app.source = { app.data }

    try {
        Recorder.worker(request, Application(), 0).doWork()
    } catch (error: IllegalStateException) {
        println(error.message)
    }
    RoundWorker.cancel(app)
    println(Recorder.enqueued.keys)
}
