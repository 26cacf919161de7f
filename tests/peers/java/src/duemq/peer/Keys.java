package duemq.peer;

import com.alibaba.fastjson.JSONObject;
import org.apache.rocketmq.acl.common.AclClientRPCHook;
import org.apache.rocketmq.acl.common.SessionCredentials;
import org.apache.rocketmq.remoting.RPCHook;

/** The account that a client's requests are signed with. */
final class Keys {
    private Keys() {
    }

    /** The library's hook with the keys of a request, null if it has none. */
    static RPCHook hook(JSONObject request) {
        String key = request.getString("access_key");
        return key == null ? null : new AclClientRPCHook(new SessionCredentials(key, request.getString("secret_key")));
    }
}
