/**
 * What an app does with a bundle of tfpfl, on Android or any other JVM: the core in C behind a Kotlin class.
 *
 *     Client(bundle = folder.path, state = "$noBackupFilesDir/head.bin").use { client ->
 *         client.personalize(examples)
 *         val update = client.round(theta, examples)
 *         send(update.payload, update.numExamples)
 *         client.commit(update)                        // when the server has taken them
 *     }
 *
 * A client is used by one thread at a time, and not by the main thread, since a round may take seconds. Its memory is
 * freed by `close`. `System.loadLibrary("tfpfl_jni")` must find the library; LiteRT's libLiteRt.so is found by the
 * system on Android, elsewhere `litert` is its path.
 */
package tfpfl

/** What cannot be used, and why. `status` is one of `tfpfl_status` in tfpfl_device.h. */
class TfpflException(val status: Int, message: String) : Exception(message)

/**
 * Preprocessed examples: their numbers, row after row, and a label in 0..K-1 for each; or, where the client's `kind` is not
 * classification, K targets for each, row after row. Where the client takes `wholeNumbers`, they are `tokens`, and `x` is
 * empty.
 */
class Examples(
    val x: FloatArray, val labels: IntArray?, val targets: FloatArray? = null, val tokens: IntArray? = null,
) {
    constructor(tokens: IntArray, labels: IntArray?, targets: FloatArray? = null) :
        this(FloatArray(0), labels, targets, tokens)

    internal val arrays: Array<Any?> get() = arrayOf(x, tokens, labels, targets)
}

/**
 * The mean loss, for classes cross-entropy in nats; the accuracy in 0..1, NaN for other kinds; and the score by which heads
 * are compared, see `tfpfl_scores`.
 */
data class Scores(val loss: Double, val accuracy: Double, val value: Double)

/** The result of fitting the head: on held-out examples, and the training losses. */
data class Personalized(
    val kept: Boolean, val before: Scores, val after: Scores, val lossBefore: Double, val loss: Double,
)

/**
 * A head: kernel [M, K], row after row, bias [K], the sha256 of the theta that it was fitted with, and the names of its
 * classes as JSON, if they are not the bundle's.
 */
class Head(val kernel: FloatArray, val bias: FloatArray, val thetaSha256: ByteArray, val names: ByteArray? = null) {
    init {
        require(thetaSha256.size == 32) { "a sha256 has 32 bytes, found ${thetaSha256.size}" }
    }
}

/** The result of a round. Send the payload and the number of examples, and nothing else; the head stays here. */
class Update(val payload: ByteArray, val numExamples: Int, val loss: Float, val head: Head)

/**
 * One client. `state` is the file that keeps the head between starts; null: it is kept in memory only. On Android it
 * lies in noBackupFilesDir: Auto Backup uploads what is in filesDir, and the head must not leave the device. `trunk` is
 * the file of the frozen trunk, such as trunk_int8.tflite; null: the exact one.
 * All functions throw [TfpflException]; the head has not changed then, but for an error which says that its file is the
 * new one.
 */
class Client(
    bundle: String, state: String? = null, litert: String? = null, trunk: String? = null,
) : AutoCloseable {
    private var handle: Long =
        Native.open(bytes(bundle), state?.let(::bytes), litert?.let(::bytes), trunk?.let(::bytes))
    private val sizes: LongArray = Native.sizes(open())

    val numFeatures: Int get() = sizes[0].toInt()
    val numClasses: Int get() = sizes[1].toInt()
    val numWeights: Int get() = sizes[2].toInt()
    val takesPartInRounds: Boolean get() = sizes[5] != 0L
    /** What the head is for: classification, multilabel, regression, poisson, quantile:Q or huber:DELTA. */
    val kind: String get() = Native.kind(open())
    val exampleShape: IntArray get() = IntArray(sizes.size - 8) { sizes[8 + it].toInt() }
    /** Whether examples are whole numbers, such as tokens; they are below `numTokens`, if that is not 0. */
    val wholeNumbers: Boolean get() = sizes[6] != 0L
    val numTokens: Int get() = sizes[7].toInt()

    /** The weights of the backbone. */
    val theta: FloatArray get() = Native.theta(open())

    /** The client's head. */
    val head: Head get() = newHead().also { Native.head(open(), it.kernel, it.bias, it.thetaSha256) }

    /** Whether theta has changed since the head was fitted. The head still works; `personalize` fits it again. */
    val headIsStale: Boolean get() = Native.isStale(open())

    /** Replaces theta; the head stays as it is. */
    fun receive(theta: FloatArray) = Native.receive(open(), theta)

    /** Replaces the head, and saves it. */
    fun startFrom(head: Head) = Native.startFrom(open(), head.kernel, head.bias, head.thetaSha256, head.names, false)

    /**
     * The examples that all other functions take, from `count` preprocessed ones. In a bundle with a frozen trunk they are
     * its output: compute it once for each example, and keep it. In any other bundle they are `raw` itself; tokens are given
     * as they are.
     */
    fun examplesOf(raw: FloatArray, count: Int): FloatArray =
        Native.examplesOf(open(), Examples(raw, null).arrays, count)

    /** The features of `count` examples: [count, M]. */
    fun features(x: FloatArray, count: Int): FloatArray = Native.features(open(), Examples(x, null).arrays, count)

    fun features(tokens: IntArray, count: Int): FloatArray =
        Native.features(open(), Examples(tokens, null).arrays, count)

    /** The predictions for `count` examples, [count, K]: for classes their probabilities. */
    fun predict(x: FloatArray, count: Int): FloatArray = Native.predict(open(), Examples(x, null).arrays, count)

    fun predict(tokens: IntArray, count: Int): FloatArray =
        Native.predict(open(), Examples(tokens, null).arrays, count)

    fun score(examples: Examples): Scores =
        Native.score(open(), examples.arrays).let { Scores(it[0], it[1], it[2]) }

    /**
     * Fits the head by gradient steps, and keeps it if it is better on held-out examples: on `other`, on the training
     * examples themselves (`onTraining`), or on the part `heldOut` of the examples. Null: the run's steps and rate.
     */
    fun personalize(
        examples: Examples, steps: Int? = null, beta: Double? = null, heldOut: Double = 0.25,
        onTraining: Boolean = false, other: Examples? = null,
    ): Personalized {
        val found = Native.personalize(
            open(), examples.arrays, steps != null, steps ?: 0, beta != null, beta ?: 0.0, heldOut, onTraining,
            other?.arrays,
        )
        val (before, after) = listOf(1, 4).map { Scores(found[it], found[it + 1], found[it + 2]) }
        return Personalized(found[0] != 0.0, before, after, found[7], found[8])
    }

    /** Takes part in a round. The client's head does not change until `commit`. `payload`: "float32" or "int8". */
    fun round(theta: FloatArray, examples: Examples, payload: String = "float32"): Update {
        val head = newHead()
        val loss = FloatArray(1)
        val sent = Native.round(
            open(), theta, examples.arrays, bytes(payload), head.kernel, head.bias, head.thetaSha256, loss,
        )
        return Update(sent, examples.labels?.size ?: (examples.targets!!.size / numClasses), loss[0], head)
    }

    /** Makes the head of a round current when the server has taken the update, and saves it. */
    fun commit(update: Update) = update.head.let {
        Native.startFrom(open(), it.kernel, it.bias, it.thetaSha256, it.names, true)
    }

    override fun close() {
        val closed = handle
        handle = 0L
        Native.close(closed)
    }

    private fun open(): Long = handle.also { check(it != 0L) { "this client is closed" } }

    private fun newHead() =
        Head(FloatArray(numFeatures * numClasses), FloatArray(numClasses), ByteArray(32), Native.names(open()))

    private fun bytes(text: String): ByteArray {
        require('\u0000' !in text) { "a path without the character NUL is needed" }
        return text.encodeToByteArray()
    }
}

/** The functions of tfpfl_jni.c. `arrays` are those of [Examples]. */
internal object Native {
    init {
        System.loadLibrary("tfpfl_jni")
    }

    @JvmStatic external fun open(bundle: ByteArray, state: ByteArray?, litert: ByteArray?, trunk: ByteArray?): Long
    @JvmStatic external fun names(client: Long): ByteArray?
    @JvmStatic external fun kind(client: Long): String
    @JvmStatic external fun examplesOf(client: Long, arrays: Array<Any?>, count: Int): FloatArray
    @JvmStatic external fun close(client: Long)
    @JvmStatic external fun sizes(client: Long): LongArray
    @JvmStatic external fun theta(client: Long): FloatArray
    @JvmStatic external fun head(client: Long, kernel: FloatArray, bias: FloatArray, thetaSha256: ByteArray)
    @JvmStatic external fun isStale(client: Long): Boolean
    @JvmStatic external fun receive(client: Long, theta: FloatArray)

    @JvmStatic external fun startFrom(
        client: Long, kernel: FloatArray, bias: FloatArray, thetaSha256: ByteArray, names: ByteArray?, commit: Boolean,
    )

    @JvmStatic external fun features(client: Long, arrays: Array<Any?>, count: Int): FloatArray
    @JvmStatic external fun predict(client: Long, arrays: Array<Any?>, count: Int): FloatArray
    @JvmStatic external fun score(client: Long, arrays: Array<Any?>): DoubleArray

    @JvmStatic external fun personalize(
        client: Long, arrays: Array<Any?>, ownSteps: Boolean, steps: Int, ownBeta: Boolean, beta: Double,
        heldOut: Double, onTraining: Boolean, others: Array<Any?>?,
    ): DoubleArray

    @JvmStatic external fun round(
        client: Long, theta: FloatArray, arrays: Array<Any?>, payload: ByteArray, kernel: FloatArray, bias: FloatArray,
        thetaSha256: ByteArray, loss: FloatArray,
    ): ByteArray
}
