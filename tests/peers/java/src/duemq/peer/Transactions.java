package duemq.peer;

import com.alibaba.fastjson.JSONArray;
import com.alibaba.fastjson.JSONObject;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/** The transactional producers of this process, by handle. Each message is sent with what its transaction ends in. */
final class Transactions {
    private final Map<String, TransactionMQProducer> producers = new ConcurrentHashMap<>();

    JSONObject start(JSONObject request) throws Exception {
        String handle = request.getString("handle");
        TransactionMQProducer producer = new TransactionMQProducer(request.getString("group"));
        Messages.configure(producer, request, handle);
        producer.setTransactionListener(new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message message, Object outcome) {
                return state((String) outcome);
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                return LocalTransactionState.UNKNOW; // what was left open stays so, however often the broker asks
            }
        });
        producer.start();
        producers.put(handle, producer);
        return new JSONObject();
    }

    JSONObject stop(JSONObject request) {
        producers.remove(request.getString("handle")).shutdown();
        return new JSONObject();
    }

    JSONObject send(JSONObject request) {
        TransactionMQProducer producer = producers.get(request.getString("handle"));
        JSONArray messages = request.getJSONArray("messages");
        JSONArray outcomes = request.getJSONArray("outcomes");
        JSONArray results = new JSONArray();
        for (int i = 0; i < messages.size(); i++) {
            Message message = Messages.toSend(request.getString("topic"), messages.getJSONObject(i));
            try {
                results.add(Messages.sent(producer.sendMessageInTransaction(message, outcomes.getString(i))));
            } catch (Exception e) {
                results.add(Messages.failed(e));
            }
        }
        JSONObject result = new JSONObject();
        result.put("results", results);
        return result;
    }

    private static LocalTransactionState state(String outcome) {
        return switch (outcome) {
            case "commit" -> LocalTransactionState.COMMIT_MESSAGE;
            case "rollback" -> LocalTransactionState.ROLLBACK_MESSAGE;
            case "open" -> LocalTransactionState.UNKNOW;
            default -> throw new IllegalArgumentException("no such outcome");
        };
    }
}
