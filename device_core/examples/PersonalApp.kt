// The part of an app for Android that takes part in rounds at night. An app adds `roundServer` and `examples`.
import android.app.Application
import java.io.File
import tfpfl.Client
import tfpfl.android.RoundApp
import tfpfl.android.RoundWorker
import tfpfl.android.receiveKept

abstract class PersonalApp : Application(), RoundApp {
    override val pending get() = File(noBackupFilesDir, "update.bin")
    override val keptTheta get() = File(noBackupFilesDir, "head_theta.bin")

    override fun onCreate() {
        super.onCreate()
        RoundWorker.schedule(this)
    }

    override fun openClient() =
        Client(File(noBackupFilesDir, "bundle").path, File(noBackupFilesDir, "head.bin").path).receiveKept(keptTheta)
}
