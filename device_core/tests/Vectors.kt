// Computes what vectors.c computes, through Client.kt: VectorsKt BUNDLE LIBLITERT FOLDER
import java.io.File
import java.nio.ByteBuffer
import java.nio.ByteOrder.LITTLE_ENDIAN
import tfpfl.Client
import tfpfl.Examples
import tfpfl.TfpflException

fun bytesOf(numbers: FloatArray): ByteArray =
    ByteBuffer.allocate(4 * numbers.size).order(LITTLE_ENDIAN).also { it.asFloatBuffer().put(numbers) }.array()

fun refused(what: () -> Unit): String =
    try {
        what()
        "not refused"
    } catch (error: TfpflException) {
        "${error.status} ${error.message}"
    }

fun main(arguments: Array<String>) {
    val (bundle, litert, folder) = arguments
    fun buffer(name: String) = ByteBuffer.wrap(File(folder, name).readBytes()).order(LITTLE_ENDIAN)
    fun floats(name: String) = buffer(name).asFloatBuffer().let { b -> FloatArray(b.remaining()) { b.get() } }
    fun write(name: String, content: ByteArray) = File(folder, name).writeBytes(content)

    val x = floats("x.bin")
    val theta = floats("theta.bin")
    val labels = buffer("y.bin").asIntBuffer().let { b -> IntArray(b.remaining()) { b.get() } }
    val examples = Examples(x, labels)
    val state = File(folder, "state.bin")
    val scores: String
    Client(bundle, state.path, litert).use { client ->
        write("features.bin", bytesOf(client.features(x, labels.size)))
        write("probabilities.bin", bytesOf(client.predict(x, labels.size)))
        val found = client.personalize(examples, onTraining = true)
        check(client.score(examples).loss == found.after.loss && found.kept && !client.headIsStale)
        state.copyTo(File(folder, "personalized.bin"))
        scores = "${found.before.loss} ${found.after.loss}"
        write("float32.payload", client.round(theta, examples).payload)
        val update = client.round(theta, examples, "int8")
        write("int8.payload", update.payload)
        client.commit(update)
        state.copyTo(File(folder, "committed.bin"))
        check(client.head.bias.contentEquals(update.head.bias) && client.theta.contentEquals(theta))
        check(client.exampleShape.fold(1) { a, b -> a * b } * labels.size == x.size && client.takesPartInRounds)
        write("refused.txt", listOf(
            refused { Client("/nowhere/\uD83D\uDE00", null, litert) },
            refused { Client(bundle, null, "/nowhere/lib.so") },
            refused { client.predict(x, labels.size + 1) },
            refused { client.personalize(Examples(x, IntArray(labels.size) { 99 })) },
            refused { client.personalize(examples, heldOut = 2.0) },
            refused { client.personalize(examples, other = Examples(FloatArray(0), IntArray(0))) },
            refused { client.round(theta.copyOf(3), examples) },
            refused { client.round(theta, examples, "int4") },
            refused { client.receive(FloatArray(theta.size) { Float.NaN }) },
        ).joinToString("\n").encodeToByteArray())
    }
    println(scores)
}
