package duemq.peer;

import com.alibaba.fastjson.JSONObject;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.remoting.netty.NettyClientConfig;
import org.apache.rocketmq.remoting.netty.NettyRemotingClient;
import org.apache.rocketmq.remoting.netty.TlsSystemConfig;
import org.apache.rocketmq.remoting.protocol.RemotingCommand;

/** RocketMQ's remoting clients of this process, by handle: what all its clients speak through, with TLS or without. */
final class Remotings {
    private static final int GET_BROKER_CONFIG = 26;

    /** Longer than a test waits for this program, ms: a call that ends was answered, or its connection was closed. */
    private static final int TIMEOUT_MS = 120_000;

    private final Map<String, NettyRemotingClient> clients = new ConcurrentHashMap<>();

    /** Starts a client; with TLS, by the properties in a file, as -Dtls.config.file names it. */
    synchronized JSONObject start(JSONObject request) {
        NettyClientConfig config = new NettyClientConfig();
        config.setUseTLS(request.getBooleanValue("tls"));
        TlsSystemConfig.tlsConfigFile = request.getString("tls_file"); // read when a client is made
        NettyRemotingClient client = new NettyRemotingClient(config);
        client.start();
        clients.put(request.getString("handle"), client);
        return new JSONObject();
    }

    /** Ends a client in the background: that takes three seconds with 5.x, which waits for its event loops. */
    JSONObject stop(JSONObject request) {
        Thread thread = new Thread(clients.remove(request.getString("handle"))::shutdown);
        thread.setDaemon(true);
        thread.start();
        return new JSONObject();
    }

    /** Asks a broker for its settings, and returns the code of the answer. */
    JSONObject ask(JSONObject request) throws Exception {
        NettyRemotingClient client = clients.get(request.getString("handle"));
        RemotingCommand command = RemotingCommand.createRequestCommand(GET_BROKER_CONFIG, null);
        RemotingCommand answer = client.invokeSync(request.getString("address"), command, TIMEOUT_MS);
        JSONObject result = new JSONObject();
        result.put("code", answer.getCode());
        return result;
    }
}
