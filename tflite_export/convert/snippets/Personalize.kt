// Client @@CLIENT@@: prediction, personalization of the head and a PFLEGO round, with LiteRT's Interpreter on Android.
// NOT COMPILED and not run on a phone: it was written against the documentation of the Interpreter API. It does
// what tflite_export/device/client.py does, which is tested on @@RUNTIMES@@.
//
// build.gradle: implementation("com.google.ai.edge.litert:litert:1.4.0") // or newer; at least 1.1 (WHILE)
// assets: program_static.tflite, theta.bin, head.bin, labels.txt

import org.tensorflow.lite.Interpreter
import java.io.File
import java.io.FileOutputStream
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.FloatBuffer
import java.nio.IntBuffer

const val N = @@N@@ // examples of a call; fill up with zeros whose weight is 0
const val P = @@P@@ // numbers in theta
const val M = @@M@@ // features
const val K = @@K@@ // classes
const val PIXELS = @@PIXELS@@ // numbers in an example, shape @@SHAPE@@
const val TAU = @@TAU@@
const val BETA = @@BETA@@f
const val HEAD_RATE = @@HEAD_RATE@@f

fun floats(size: Int): FloatBuffer =
    ByteBuffer.allocateDirect(4 * size).order(ByteOrder.nativeOrder()).asFloatBuffer()

fun ints(size: Int): IntBuffer = ByteBuffer.allocateDirect(4 * size).order(ByteOrder.nativeOrder()).asIntBuffer()

/** At most N examples. `x` is float32, preprocessed as manifest.json says; `labels` are in 0..K-1. */
class Examples(x: Array<FloatArray>, labels: IntArray) {
    val count = x.size
    val x = floats(N * PIXELS)
    val labels = ints(N)
    val weights = floats(N)

    init {
        require(count in 1..N) { "take the examples in chunks of $N, with weights 1 / their total number" }
        for (i in 0 until count) {
            require(labels[i] in 0 until K) { "label ${labels[i]} is out of range" }
            require(x[i].all { it.isFinite() }) { "example $i is not finite" }
            this.x.put(x[i])
            this.labels.put(i, labels[i])
            this.weights.put(i, 1f / count)
        }
        this.x.rewind()
    }
}

class Client(program: File, private val theta: FloatBuffer, private val kernel: FloatBuffer, private val bias: FloatBuffer) {
    private val interpreter = Interpreter(program)

    fun predict(x: FloatBuffer): FloatBuffer {
        val probabilities = floats(N * K)
        val inputs = mapOf<String, Any>("theta" to theta, "x" to x, "kernel" to kernel, "bias" to bias)
        interpreter.runSignature(inputs, mapOf<String, Any>("probabilities" to probabilities), "predict")
        return probabilities
    }

    /** The new head; keep it only if it beats the old one on examples that it was not fitted to. */
    fun personalize(e: Examples, steps: Int = TAU - 1): Pair<FloatBuffer, FloatBuffer> {
        val phi = floats(N * M)
        interpreter.runSignature(mapOf<String, Any>("theta" to theta, "x" to e.x), mapOf<String, Any>("phi" to phi), "features")
        val newKernel = floats(M * K)
        val newBias = floats(K)
        val inputs = mapOf<String, Any>(
            "phi" to phi, "labels" to e.labels, "weights" to e.weights, "kernel" to kernel, "bias" to bias,
            "steps" to scalar(steps), "beta" to scalar(BETA),
        )
        val outputs = mapOf<String, Any>(
            "kernel" to newKernel, "bias" to newBias, "loss" to floats(1), "loss_before" to floats(1),
        )
        interpreter.runSignature(inputs, outputs, "personalize")
        return newKernel to newBias
    }
    // begin round
    /** A round: send `dtheta` and the number of examples, nothing else; the new head stays here. */
    fun round(newTheta: FloatBuffer, e: Examples): Triple<FloatBuffer, FloatBuffer, FloatBuffer> {
        val dtheta = floats(P)
        val newKernel = floats(M * K)
        val newBias = floats(K)
        val inputs = mapOf<String, Any>(
            "theta" to newTheta, "x" to e.x, "labels" to e.labels, "weights" to e.weights, "kernel" to kernel,
            "bias" to bias, "steps" to scalar(TAU - 1), "beta" to scalar(BETA), "rate" to scalar(HEAD_RATE),
        )
        val outputs = mapOf<String, Any>(
            "dtheta" to dtheta, "kernel" to newKernel, "bias" to newBias, "loss" to floats(1),
        )
        interpreter.runSignature(inputs, outputs, "round")
        return Triple(dtheta, newKernel, newBias)
    }
    // end round

    private fun scalar(value: Float) = floats(1).apply { put(0, value) }
    private fun scalar(value: Int) = ints(1).apply { put(0, value) }
}

/** The old file or the new one, never half of one. `content` is laid out as head.bin: see docs/on_device.md. */
fun saveHead(file: File, content: ByteArray) {
    val temporary = File(file.parentFile, file.name + ".new")
    FileOutputStream(temporary).use {
        it.write(content)
        it.fd.sync()
    }
    check(temporary.renameTo(file)) { "the head was not saved; the old one is whole" }
}
