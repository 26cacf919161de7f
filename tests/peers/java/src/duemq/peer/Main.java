package duemq.peer;

import com.alibaba.fastjson.JSON;
import com.alibaba.fastjson.JSONObject;
import com.alibaba.fastjson.serializer.SerializerFeature;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.common.MQVersion;

/**
 * Apache's Java client as a process: one JSON request a line in, replies and events out (tests/peers/PROTOCOL.md).
 *
 * <p>Every request runs in a thread of its own, since a send to a broker that is down or a long pull must not hold up
 * the others.
 */
public final class Main {
    private final PrintStream out;
    private final Map<String, Operation> operations = new HashMap<>();

    /** One thing the program can be asked to do. */
    interface Operation {
        JSONObject run(JSONObject request) throws Exception;
    }

    private Main(PrintStream out) {
        this.out = out;
        Producers producers = new Producers();
        PushConsumers consumers = new PushConsumers(this::write);
        PullConsumers pulls = new PullConsumers();
        Admins admins = new Admins();
        Transactions transactions = new Transactions();
        Remotings remotings = new Remotings();
        operations.put("hello", Main::hello);
        operations.put("producer_start", producers::start);
        operations.put("producer_stop", producers::stop);
        operations.put("send", producers::send);
        operations.put("recall", producers::recall);
        operations.put("transactions_start", transactions::start);
        operations.put("transactions_stop", transactions::stop);
        operations.put("transactions_send", transactions::send);
        operations.put("consumer_start", consumers::start);
        operations.put("consumer_stop", consumers::stop);
        operations.put("pull", pulls::pull);
        operations.put("lite_pull", pulls::litePull);
        operations.put("consumer_offset", pulls::consumerOffset);
        operations.put("queues", pulls::queues);
        operations.put("offset", pulls::offset);
        operations.put("admin", admins::call);
        operations.put("remoting_start", remotings::start);
        operations.put("remoting_stop", remotings::stop);
        operations.put("remoting_ask", remotings::ask);
    }

    public static void main(String[] arguments) throws IOException {
        PrintStream out = new PrintStream(System.out, false, StandardCharsets.UTF_8);
        System.setOut(System.err); // whatever a library prints must not get between our lines
        new Main(out).serve();
        System.exit(0); // clients that were not stopped have threads that would keep the process
    }

    private void serve() throws IOException {
        ExecutorService pool = Executors.newCachedThreadPool();
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            JSONObject request = JSON.parseObject(line);
            pool.execute(() -> write(answer(request)));
        }
    }

    private JSONObject answer(JSONObject request) {
        JSONObject reply = new JSONObject();
        reply.put("id", request.get("id"));
        try {
            Operation operation = operations.get(request.getString("op"));
            if (operation == null) {
                throw new IllegalArgumentException("no such operation");
            }
            reply.put("result", operation.run(request));
        } catch (Exception | LinkageError e) {
            reply.put("error", error(e));
        }
        return reply;
    }

    private synchronized void write(JSONObject line) {
        // Without the features fastjson writes numbers as keys, and an object that occurs twice as a reference.
        out.println(JSON.toJSONString(line,
            SerializerFeature.WriteNonStringKeyAsString, SerializerFeature.DisableCircularReferenceDetect));
        out.flush();
    }

    private static JSONObject hello(JSONObject request) {
        JSONObject result = new JSONObject();
        result.put("client", "java");
        result.put("version", MQVersion.getVersionDesc(MQVersion.CURRENT_VERSION));
        return result;
    }

    /** An exception as the caller sees it, with the broker's response code if there is one. */
    static JSONObject error(Throwable e) {
        JSONObject error = new JSONObject();
        error.put("type", e.getClass().getSimpleName());
        error.put("message", String.valueOf(e.getMessage()));
        if (e instanceof MQBrokerException) {
            error.put("code", ((MQBrokerException) e).getResponseCode());
        } else if (e instanceof MQClientException) {
            error.put("code", ((MQClientException) e).getResponseCode());
        }
        return error;
    }
}
