package android.content;

import java.io.File;

public abstract class Context {
    public abstract Context getApplicationContext();

    public abstract File getNoBackupFilesDir();
}
