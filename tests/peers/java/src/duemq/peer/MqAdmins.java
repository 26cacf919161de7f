package duemq.peer;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.lang.reflect.Field;
import java.lang.reflect.Modifier;
import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.concurrent.Semaphore;
import org.apache.rocketmq.tools.command.MQAdminStartup;

/**
 * Runs mqadmin once for each line of the standard input, whose parts are separated by tabs, and prints a mark after each.
 * Each run has its own objects of commands: some of them keep their client.
 *
 * <p>Every command ends its client, and in 5.x that takes up to three seconds, for a thread that polls a queue. That
 * thread is interrupted when the command waits for it.
 */
public final class MqAdmins {
    private static final String POLLING_THREAD = "NettyEventExecutor";
    private static final Semaphore COMMANDS = new Semaphore(0);
    private static volatile boolean isRunning;

    private MqAdmins() {}

    public static void main(String[] args) throws Exception {
        Thread own = Thread.currentThread();
        Thread helper = new Thread(() -> shortenWaits(own));
        helper.setDaemon(true);
        helper.start();
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            isRunning = true;
            COMMANDS.release();
            forgetCommands();
            MQAdminStartup.main0(line.split("\t"), null);
            isRunning = false;
            System.out.println("\n==== end of mqadmin");
            System.out.flush();
        }
        System.exit(0);
    }

    private static void forgetCommands() throws IllegalAccessException {
        for (Field field : MQAdminStartup.class.getDeclaredFields()) {
            if (Modifier.isStatic(field.getModifiers()) && List.class.isAssignableFrom(field.getType())) {
                field.setAccessible(true);
                ((List<?>) field.get(null)).clear();
            }
        }
    }

    private static void shortenWaits(Thread own) {
        try {
            while (true) {
                COMMANDS.acquire();
                while (isRunning) {
                    Thread.sleep(20);
                    if (isJoining(own)) {
                        interruptPolling();
                    }
                }
            }
        } catch (InterruptedException e) {
            Thread.currentThread().interrupt();
        }
    }

    private static boolean isJoining(Thread thread) {
        for (StackTraceElement frame : thread.getStackTrace()) {
            if (frame.getClassName().endsWith(".ServiceThread") && frame.getMethodName().equals("shutdown")) {
                return true;
            }
        }
        return false;
    }

    private static void interruptPolling() {
        Thread[] threads = new Thread[2 * Thread.activeCount() + 8];
        int count = Thread.enumerate(threads);
        for (int n = 0; n < count; n++) {
            if (threads[n].getName().startsWith(POLLING_THREAD)) {
                threads[n].interrupt();
            }
        }
    }
}
