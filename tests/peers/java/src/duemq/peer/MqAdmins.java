package duemq.peer;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import org.apache.rocketmq.tools.command.MQAdminStartup;

/** Runs mqadmin once for each line of the standard input, whose parts are separated by tabs, and prints a mark after each. */
public final class MqAdmins {
    private MqAdmins() {}

    public static void main(String[] args) throws Exception {
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            MQAdminStartup.main0(line.split("\t"), null);
            System.out.println("\n==== end of mqadmin");
            System.out.flush();
        }
        System.exit(0);
    }
}
