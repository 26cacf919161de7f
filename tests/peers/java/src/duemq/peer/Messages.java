package duemq.peer;

import com.alibaba.fastjson.JSONArray;
import com.alibaba.fastjson.JSONObject;
import java.util.Base64;
import java.util.Collection;
import java.util.Map;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageClientExt;
import org.apache.rocketmq.common.message.MessageExt;

/** Between the library's messages and our JSON. */
final class Messages {
    private Messages() {
    }

    static Message toSend(String topic, JSONObject json) {
        Message message = new Message(topic, Base64.getDecoder().decode(json.getString("body")));
        if (json.containsKey("tags")) {
            message.setTags(json.getString("tags"));
        }
        if (json.containsKey("keys")) {
            message.setKeys(json.getString("keys"));
        }
        if (json.containsKey("level")) {
            message.setDelayTimeLevel(json.getIntValue("level"));
        }
        if (json.containsKey("timer")) {
            Compat.setTimer(message, json.getJSONObject("timer"));
        }
        if (json.containsKey("properties")) {
            // Not putUserProperty: tests also set properties that the library keeps to itself, like the timer's.
            for (Map.Entry<String, Object> entry : json.getJSONObject("properties").entrySet()) {
                MessageAccessor.putProperty(message, entry.getKey(), String.valueOf(entry.getValue()));
            }
        }
        return message;
    }

    static JSONObject sent(SendResult result) {
        JSONObject json = new JSONObject();
        json.put("status", result.getSendStatus().name());
        json.put("msg_id", result.getMsgId());
        json.put("offset_msg_id", result.getOffsetMsgId());
        json.put("queue_id", result.getMessageQueue().getQueueId());
        json.put("queue_offset", result.getQueueOffset());
        json.put("transaction_id", result.getTransactionId());
        json.put("recall_handle", Compat.recallHandle(result));
        return json;
    }

    static JSONObject failed(Throwable e) {
        JSONObject json = new JSONObject();
        json.put("error", Main.error(e));
        return json;
    }

    static JSONObject received(MessageExt message) {
        JSONObject json = new JSONObject();
        json.put("receive_time", System.currentTimeMillis());
        json.put("topic", message.getTopic());
        json.put("queue_id", message.getQueueId());
        json.put("queue_offset", message.getQueueOffset());
        json.put("body", Base64.getEncoder().encodeToString(message.getBody() == null ? new byte[0] : message.getBody()));
        json.put("tags", message.getTags());
        json.put("keys", message.getKeys());
        json.put("properties", message.getProperties());
        json.put("reconsume_times", message.getReconsumeTimes());
        json.put("msg_id", message.getMsgId());
        json.put("offset_msg_id", message instanceof MessageClientExt
            ? ((MessageClientExt) message).getOffsetMsgId() : message.getMsgId());
        json.put("born_time", message.getBornTimestamp());
        json.put("store_time", message.getStoreTimestamp());
        json.put("commitlog_offset", message.getCommitLogOffset());
        return json;
    }

    static JSONArray received(Collection<MessageExt> messages) {
        JSONArray array = new JSONArray();
        for (MessageExt message : messages) {
            array.add(received(message));
        }
        return array;
    }

    /**
     * What every client of ours is given. The intervals are short so that a test does not wait half a minute for a
     * route or for the heartbeat after the broker's restart, and the time for an answer is long, since a busy machine
     * may need more than the library's 3 s; what is sent is the same.
     */
    static void configure(ClientConfig client, JSONObject request, String handle) {
        client.setNamesrvAddr(request.getString("nameserver"));
        client.setInstanceName(handle);
        client.setPollNameServerInterval(1000);
        client.setHeartbeatBrokerInterval(1000);
        client.setMqClientApiTimeout(30_000);
        client.setVipChannelEnabled(request.getBooleanValue("vip"));
    }
}
