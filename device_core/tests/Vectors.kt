// Computes what vectors.c computes, through Client.kt: VectorsKt BUNDLE LIBLITERT FOLDER
import java.io.File
import java.nio.ByteBuffer
import java.nio.ByteOrder.LITTLE_ENDIAN
import tfpfl.Client
import tfpfl.Examples
import tfpfl.Head
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

    fun ints(name: String) = buffer(name).asIntBuffer().let { b -> IntArray(b.remaining()) { b.get() } }

    val theta = floats("theta.bin")
    val state = File(folder, "state.bin")
    val scores: String
    Client(bundle, state.path, litert).use { client ->
        val classes = client.kind == "classification"
        val labels = ints("y.bin")
        val count = if (classes) labels.size else labels.size / client.numClasses
        val tokens = if (client.wholeNumbers) ints("x.bin") else null
        val x = if (tokens == null) client.examplesOf(floats("x.bin"), count) else FloatArray(0)
        val targets = if (classes) null else floats("y.bin")
        val examples = Examples(x, if (classes) labels else null, targets, tokens)
        val wrong = Examples(
            x, if (classes) IntArray(count) { 99 } else null, targets?.let { it.copyOf().apply { fill(Float.NaN) } }, tokens,
        )
        write("examples.bin", if (tokens == null) bytesOf(x) else File(folder, "x.bin").readBytes())
        write("features.bin", bytesOf(tokens?.let { client.features(it, count) } ?: client.features(x, count)))
        write("probabilities.bin", bytesOf(tokens?.let { client.predict(it, count) } ?: client.predict(x, count)))
        val found = client.personalize(examples, onTraining = true)
        check(found.after.accuracy.isNaN() != classes && (!classes || found.after.value == found.after.accuracy))
        val labelled = refused { client.score(Examples(x, IntArray(count), FloatArray(1), tokens)) }
        check(if (classes) labelled == "not refused" else labelled.startsWith("1 targets must be numbers"))
        check(client.score(examples).loss == found.after.loss && found.kept && !client.headIsStale)
        state.copyTo(File(folder, "personalized.bin"))
        scores = "${found.before.loss} ${found.after.loss}"
        write("float32.payload", client.round(theta, examples).payload)
        val update = client.round(theta, examples, "int8")
        write("int8.payload", update.payload)
        client.commit(update)
        state.copyTo(File(folder, "committed.bin"))
        check(client.head.bias.contentEquals(update.head.bias) && client.theta.contentEquals(theta))
        val numbers = client.exampleShape.fold(1) { a, b -> a * b } * count
        check(numbers == (tokens?.size ?: x.size) && client.takesPartInRounds)
        val names = List(client.numClasses) { "\"\uD83D\uDE00$it\"" }.joinToString(", ", "[", "]").encodeToByteArray()
        val old = client.head
        val short = runCatching { client.startFrom(Head(old.kernel, old.bias, ByteArray(5), names)) }.exceptionOrNull()
        check(short is IllegalArgumentException && short.message == "a sha256 has 32 bytes, found 5")
        client.startFrom(Head(old.kernel, old.bias, old.thetaSha256, names))
        check(old.names == null && client.head.names!!.contentEquals(names))
        state.copyTo(File(folder, "named.bin"))
        write("refused.txt", listOf(
            refused { Client("/nowhere/\uD83D\uDE00", null, litert) },
            refused { Client(bundle, null, "/nowhere/lib.so") },
            refused { client.commit(update) },
            refused { tokens?.let { client.predict(it, count + 1) } ?: client.predict(x, count + 1) },
            refused { tokens?.let { client.predict(it, -1) } ?: client.predict(x, -1) },
            refused { tokens?.let { client.features(it, 2_000_000_000) } ?: client.features(x, 2_000_000_000) },
            refused { client.personalize(wrong) },
            refused { client.personalize(examples, heldOut = 2.0) },
            refused { client.personalize(examples, steps = Int.MIN_VALUE) },
            refused { client.personalize(examples, beta = Double.NaN) },
            refused { client.personalize(examples, other = Examples(FloatArray(0), IntArray(0), FloatArray(0))) },
            refused { client.round(theta.copyOf(3), examples) },
            refused { client.round(theta, examples, "int4") },
            refused { client.receive(FloatArray(theta.size) { Float.NaN }) },
        ).joinToString("\n").encodeToByteArray())
    }
    println(scores)
}
